def encode(
    x: int,
    kind: int,
    grid: tuple[int, int, int],
    target: tuple[int, int, int],
    error: tuple[int, int],
    beta: float,
    threads: int,
) -> None: ...
def encode_sum(
    codes: list[int],
    scales: list[int],
    bits: int,
    grid: tuple[int, int, int],
    target: tuple[int, int, int],
    error: tuple[int, int],
    beta: float,
    threads: int,
) -> None: ...
def decode(
    out: int,
    kind: int,
    codes: list[int],
    scales: list[int],
    bits: int,
    grid: tuple[int, int, int],
    is_added: bool,
    scale: float,
    threads: int,
) -> None: ...
