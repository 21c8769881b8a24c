"""Axes of a job whose ranks were placed by another library, read from its `mpu` object."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.foreign_groups import ranks_of
from mpispeed.mesh.mesh import Topology

if TYPE_CHECKING:
    from mpispeed.mesh.world import World

# axis -> names of its getters; the first that exists counts. `model_parallel` may mean stages and slices together,
# and data those of each part of a sequence alone, or of all parts together.
GETTERS = {
    "pipe": ("pipeline_model_parallel", "pipe_parallel"),
    "data": ("data_parallel",),
    "sequence": ("sequence_parallel", "context_parallel"),
    "model": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}
DATA = "sequence_data_parallel"
"""Getters of the ranks with the same part of the model, however sequences are cut."""
ORDERS = tuple(
    tuple(axis for axes in order for axis in axes)
    for order in itertools.permutations((("pipe",), ("data", "sequence"), ("model",)))
)
"""Orders of the axes, slowest first; ranks that share sequences are neighbours among those with equal slices."""


@dataclass(frozen=True, slots=True)
class _Place:
    """This rank's place on an axis by the mpu; `ranks` is None if they cannot be read off its group.

    `axes` is one axis, or several where the group spans them: pipe and model, or data and sequence.
    """

    axes: tuple[str, ...]
    index: int
    size: int
    ranks: list[int] | None


def axes_of(mpu: Any, world: World) -> dict[str, int]:
    """Axes, slowest first, that number the ranks as an outside mpu does.

    The object has `get_<axis>_parallel_rank`, `..._world_size` and `..._group`, as Megatron's mpu and DeepSpeed's have.
    Groups may be lists of ranks, objects with `ranks`, mpi4py communicators or torch.distributed groups. Without
    getters of stages there is one stage. With getters of sequences, those of slices may be missing, too, and the data
    ranks may be told together with them (`get_sequence_data_parallel_...`) or not at all. Groups are only compared:
    communicators are created anew.

    Returns:
        Sizes of "pipe", "data" and "model" in the order that fits; where the mpu has getters of sequences also
        "sequence", the size of the inner part of "data".

    Collective over: all ranks.

    Raises:
        ConfigError: on all ranks, if the mpu lacks methods, or no order of the axes gives its groups on all ranks.
    """
    with world.comm.together(ConfigError):
        try:
            places = _read(mpu, world)
            sizes = _sizes(places, world)
            misfits = {order: _misfit(order, sizes, places, world.rank) for order in ORDERS}
        except ConfigError:
            raise
        except Exception as error:  # a getter may raise whatever it likes
            msg = f"mpu: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error
    first = world.comm.share(sizes)
    text = f"mpu: rank {world.rank} has the axes {_shown(sizes)}, rank 0 has {_shown(first)}; they have to be equal"
    world.comm.agree(sizes == first, text, ConfigError)
    reports = world.comm.gather_objects(misfits)
    for order in misfits:
        if not any(report[order] for report in reports):
            return _joined({axis: sizes[axis] for axis in order if axis in sizes})
    closest = min(misfits, key=lambda order: sum(bool(report[order]) for report in reports))
    text = next(report[closest] for report in reports if report[closest])
    msg = (
        f"mpu: its groups fit no grid of the axes {_shown(sizes)}, in no order. In the closest one, "
        f"{_shown({axis: sizes[axis] for axis in closest if axis in sizes})} with the last axis fastest, {text}"
    )
    raise ConfigError(msg)


def _joined(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes with the ranks of sequences among those of data, too."""
    axes = {axis: size for axis, size in sizes.items() if axis != "sequence"}
    if "sequence" in sizes:
        axes |= {"data": sizes["data"] * sizes["sequence"], "sequence": sizes["sequence"]}
    return axes


def _read(mpu: Any, world: World) -> list[_Place]:
    """This rank's places. Data and "model" span further axes if the sizes match the world only then."""
    found = {axis: _place(mpu, name, axis) for axis, names in GETTERS.items() if (name := _first(mpu, names))}
    for axis in ("data", "model"):
        if axis not in found and "sequence" not in found:
            known = " or ".join(f"get_{name}_world_size" for name in GETTERS[axis])
            msg = f"mpu: a {type(mpu).__name__} has no method {known}; give it data and model positions of ranks"
            raise ConfigError(msg)
    for axis in ("pipe", "model"):
        found.setdefault(axis, _Place((axis,), 0, 1, None))
    sizes = {axis: place.size for axis, place in found.items()}
    pipe, data, sequence, model = (sizes.get(axis, 1) for axis in GETTERS)
    if "data" in sizes and data * model * pipe == world.size and sequence > 1:
        found["data"] = replace(found["data"], axes=("data", "sequence"))
        sequence = 1
    if _first(mpu, GETTERS["model"]) == "model_parallel" and pipe > 1 and data * sequence * model == world.size:
        found["model"] = replace(found["model"], axes=("pipe", "model"))
    both = [_place(mpu, DATA, "data", "sequence")] if "sequence" in found and _first(mpu, (DATA,)) else []
    return [*found.values(), *both]


def _first(mpu: Any, names: Iterable[str]) -> str:
    return next((name for name in names if callable(getattr(mpu, f"get_{name}_world_size", None))), "")


def _place(mpu: Any, name: str, *axes: str) -> _Place:
    group = getattr(mpu, f"get_{name}_group", None)
    ranks = ranks_of(group()) if callable(group) else None
    index, size = (_number(mpu, f"get_{name}_{what}") for what in ("rank", "world_size"))
    return _Place(axes, index, size, ranks)


def _number(mpu: Any, getter: str) -> int:
    method = getattr(mpu, getter, None)
    if not callable(method):
        msg = f"mpu: a {type(mpu).__name__} has no method {getter}"
        raise ConfigError(msg)
    return int(method())


def _sizes(places: Sequence[_Place], world: World) -> dict[str, int]:
    for place in places:
        if place.size < 1 or not 0 <= place.index < place.size:
            msg = f"mpu: rank {world.rank} is at {place.index} of {place.size} on the axis {place.axes[-1]}"
            raise ConfigError(msg)
    sizes = {place.axes[0]: place.size for place in places if len(place.axes) == 1}
    spans = [place for place in places if len(place.axes) > 1]
    for place in spans:
        axis, other = ("model", "pipe") if "model" in place.axes else ("data", "sequence")
        sizes.setdefault(axis, place.size // sizes[other])
    sizes.setdefault("data", world.size // math.prod(sizes.values()))
    sizes = {axis: sizes[axis] for axis in GETTERS if axis in sizes}
    is_whole = all(math.prod(sizes[axis] for axis in place.axes) == place.size for place in spans)
    if not is_whole or math.prod(sizes.values()) != world.size:
        msg = (
            f"mpu: {_shown(sizes)} make {math.prod(sizes.values())} ranks, the job has {world.size}; further axes, "
            "as of experts, cannot come from an mpu"
        )
        raise ConfigError(msg)
    return sizes


def _misfit(order: tuple[str, ...], sizes: Mapping[str, int], places: Sequence[_Place], rank: int) -> str:
    """The contradiction between this rank's place and a grid of this order, or ""."""
    grid = Topology({axis: sizes[axis] for axis in order if axis in sizes})
    for place in places:
        expected, name = list(grid.peers(rank, place.axes)), " and ".join(place.axes)
        if place.ranks is not None and place.ranks != expected:
            return f"rank {rank} would be in the {name} group {expected}, the mpu says {place.ranks}"
        if grid.index(rank, place.axes) != place.index:
            return f"rank {rank} would be at {grid.index(rank, place.axes)} of {name}, the mpu says {place.index}"
    return ""


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "none"
