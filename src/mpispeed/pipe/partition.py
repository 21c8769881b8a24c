"""Partition of layers into stages, the same on all ranks, with its errors."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import StageError
from mpispeed.pipe.costs import cut_by_profile
from mpispeed.pipe.counting import count_parameters
from mpispeed.pipe.cut import cut_by_method
from mpispeed.pipe.layers import Layer, name_of, shared_parameters

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm


def partition(
    comm: Comm, layers: Sequence[Layer], method: str, num_stages: int, num_chunks: int, sample: Any = None
) -> list[int]:
    """Borders of all virtual stages, equal on all ranks.

    Args:
        comm: all ranks.
        layers: all layers.
        method: "uniform", "parameters", "best", "type:REGEX" or "profile".
        num_stages: stages.
        num_chunks: virtual stages per stage.
        sample: for "profile", the input of the first layer; read on the first rank.

    Returns:
        num_stages * num_chunks + 1 borders.

    Collective over: all ranks.

    Raises:
        StageError: the method does not work, or ranks have other layers than the first rank.
    """
    count = num_stages * num_chunks
    own: list[int] | None = None
    with comm.together(StageError, plain=StageError):
        if method.lower() != "profile":
            own = cut_by_method(method, [layer.name for layer in layers], lambda: count_parameters(layers), count)
        elif comm.rank == 0:
            own = cut_by_profile(layers, sample, num_stages, num_chunks)
    rows = repr([(layer.name, layer.spreads, layer.tie.key if layer.tie else None) for layer in layers])
    digest = hashlib.sha256(rows.encode()).digest()
    borders, first = comm.share((own, digest))
    is_equal = digest == first and own in (None, borders)
    comm.agree(is_equal, "PipelineModule: other layers than on rank 0; give all ranks the same list", StageError)
    return list(borders)


def check_shared(layers: Sequence[Layer], stage_of: Callable[[int], int]) -> None:
    """Refuse modules that share a parameter and are on different stages: nothing would keep it equal.

    Raises:
        StageError: there are such modules.
    """
    for index, (first, name) in shared_parameters(layers).items():
        if stage_of(index) != stage_of(first):
            msg = (
                f"layers {first} and {index} share the parameter {name!r} but are on the stages {stage_of(first)} and "
                f"{stage_of(index)}; describe both as TiedLayerSpec with one key, so that its gradients are summed"
            )
            raise StageError(msg)


def describe(layers: Sequence[Layer], parts: Sequence[int], num_stages: int) -> str:
    """One line per virtual stage: its layers, and how many of a kind follow each other."""
    lines = [f"{len(layers)} layers on {num_stages} stages"]
    for part, (first, stop) in enumerate(itertools.pairwise(parts)):
        names = [name_of(layer.source) for layer in layers[first:stop]]
        runs = [(name, len(list(same))) for name, same in itertools.groupby(names)]
        shown = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in runs) or "nothing"
        chunk = f" chunk {part // num_stages}" if len(parts) - 1 > num_stages else ""
        lines.append(f"stage {part % num_stages}{chunk}: layers {first} to {stop - 1}: {shown}" if stop > first else
                     f"stage {part % num_stages}{chunk}: no layers, hands its input on")  # fmt: skip
    return "\n".join(lines)
