"""Even split of a length over ranks, in pure integers, for sliced layers and their checkpoints."""

from __future__ import annotations


def share(length: int, rank: int, size: int, grain: int = 1) -> tuple[int, int]:
    """The range [start, stop) of `length` that rank `rank` of `size` has.

    The length is dealt in grains, as `numpy.array_split` deals elements: contiguous, the first ranks one grain more.
    The last grain is short where the length is no multiple. Ranks without a grain have an empty range.

    Units: `length` and `grain` are elements along one dim; grain >= 1.
    """
    grains, longer = divmod(-(-length // grain), size)
    start = rank * grains + min(rank, longer)
    stop = start + grains + (rank < longer)
    return min(start * grain, length), min(stop * grain, length)
