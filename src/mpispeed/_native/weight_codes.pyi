def vector_level() -> int: ...
def best_vector_level() -> int: ...
def set_vector_level(level: int) -> None: ...
def multiply(
    out: int,
    x: int,
    bias: int,
    count: int,
    kind: int,
    weight: tuple[int, int, int],
    sizes: tuple[int, int, int],
    bits: int,
    threads: int,
) -> None: ...
def expand(
    out: int, kind: int, weight: tuple[int, int, int], sizes: tuple[int, int, int], bits: int, threads: int
) -> None: ...
