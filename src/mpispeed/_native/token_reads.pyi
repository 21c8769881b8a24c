def read(
    table: tuple[int, int, int, int],
    starts: int,
    counts: int,
    shape: tuple[int, int],
    wide: int,
    ids: int,
    fill: int,
    labels: int,
    label_fill: int,
    shift: int,
) -> tuple[int, int]: ...
