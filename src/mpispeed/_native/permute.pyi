def wrong_place(index: int, count: int, rows: int, may_drop: bool, named: int) -> int: ...
def pick(out: int, x: int, index: int, sizes: tuple[int, int, int, int, int], threads: int) -> None: ...
def combine(
    out: int, x: int, index: int, weights: int, sizes: tuple[int, int, int, int, int], kind: int, threads: int
) -> None: ...
def spread(
    out: int,
    x: int,
    index: int,
    weights: int,
    named: int,
    sizes: tuple[int, int, int, int, int],
    kind: int,
    threads: int,
) -> None: ...
def dot(
    out: int, x: int, y: int, index: int, sizes: tuple[int, int, int, int, int], kind: int, threads: int
) -> None: ...
