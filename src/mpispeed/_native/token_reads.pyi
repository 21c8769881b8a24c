from numpy import int64
from numpy.typing import NDArray

def read(
    table: tuple[int, int, int, int],
    starts: NDArray[int64],
    counts: NDArray[int64],
    length: int,
    wide: int,
    ids: int,
    fill: int,
    labels: int,
    label_fill: int,
    shift: int,
) -> tuple[int, int]: ...
