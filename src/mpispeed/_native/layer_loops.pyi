def thin(
    out: int, x: int, weight: int, bias: int, rows: int, outputs: int, inputs: int, kind: int, threads: int
) -> None: ...
def norm(
    y: int,
    total: int,
    x: int,
    residual: int,
    weight: int,
    bias: int,
    rows: int,
    cols: int,
    eps: float,
    is_centered: bool,
    kind: int,
    threads: int,
) -> None: ...
def gate(out: int, x: int, other: int, n: int, what: int, kind: int, threads: int) -> None: ...
def rotary(
    x: int,
    cosine: int,
    sine: int,
    rows: int,
    stride: int,
    heads: int,
    size: int,
    half: int,
    table_rows: int,
    table_stride: int,
    is_halved: bool,
    kind: int,
    threads: int,
) -> None: ...
def attend(
    out: int,
    q: int,
    k: int,
    v: int,
    mask: int,
    mask_kind: int,
    mask_batch: int,
    slopes: int,
    sizes: tuple[int, int, int, int, int],
    k_strides: tuple[int, int, int],
    v_strides: tuple[int, int, int],
    scale: float,
    kind: int,
    threads: int,
) -> None: ...
