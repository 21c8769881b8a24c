"""Axes of a job whose ranks were placed by another library, read from its `mpu` object."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.foreign_groups import ranks_of
from mpispeed.mesh.mesh import Topology

if TYPE_CHECKING:
    from mpispeed.mesh.world import World

# axis -> names of its getters; the first that exists counts. `model_parallel` may mean stages and slices together.
GETTERS = {
    "pipe": ("pipeline_model_parallel", "pipe_parallel"),
    "data": ("data_parallel",),
    "model": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """This rank's place on an axis by the mpu; `ranks` is None if they cannot be read off its group.

    `axes` is one axis, or pipe and model where the group spans both.
    """

    axes: tuple[str, ...]
    index: int
    size: int
    ranks: list[int] | None


def axes_of(mpu: Any, world: World) -> dict[str, int]:
    """Axes, slowest first, that number the ranks as an outside mpu does.

    The object has `get_<axis>_parallel_rank`, `..._world_size` and `..._group`, as Megatron's mpu and DeepSpeed's have.
    Groups may be lists of ranks, objects with `ranks`, mpi4py communicators or torch.distributed groups. Without
    getters of stages there is one stage. Groups are only compared: communicators are created anew.

    Returns:
        Sizes of "pipe", "data" and "model" in the order that fits.

    Collective over: all ranks.

    Raises:
        ConfigError: on all ranks, if the mpu lacks methods, or no order of the axes gives its groups on all ranks.
    """
    with world.comm.together(ConfigError):
        try:
            places = _read(mpu, world)
            sizes = _sizes(places, world)
            misfits = {order: _misfit(order, sizes, places, world.rank) for order in itertools.permutations(GETTERS)}
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
            return {axis: sizes[axis] for axis in order}
    closest = min(misfits, key=lambda order: sum(bool(report[order]) for report in reports))
    text = next(report[closest] for report in reports if report[closest])
    msg = (
        f"mpu: its groups fit no grid of the axes {_shown(sizes)}, in no order. In the closest one, "
        f"{_shown({axis: sizes[axis] for axis in closest})} with the last axis fastest, {text}"
    )
    raise ConfigError(msg)


def _read(mpu: Any, world: World) -> list[_Place]:
    """Places on pipe, data and model. "model" spans stages and slices if the sizes match the world only then."""
    found: dict[str, tuple[str, _Place]] = {}
    for axis, names in GETTERS.items():
        name = next((name for name in names if callable(getattr(mpu, f"get_{name}_world_size", None))), "")
        if name:
            group = getattr(mpu, f"get_{name}_group", None)
            ranks = ranks_of(group()) if callable(group) else None
            index, size = (_number(mpu, f"get_{name}_{what}") for what in ("rank", "world_size"))
            found[axis] = name, _Place((axis,), index, size, ranks)
        elif axis == "pipe":
            found[axis] = "", _Place((axis,), 0, 1, None)
        else:
            known = " or ".join(f"get_{name}_world_size" for name in names)
            msg = f"mpu: a {type(mpu).__name__} has no method {known}; give it data and model positions of ranks"
            raise ConfigError(msg)
    (_, pipe), (_, data), (name, model) = found.values()
    if name == "model_parallel" and pipe.size > 1 and data.size * model.size == world.size:
        model = replace(model, axes=("pipe", "model"))
    return [pipe, data, model]


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
    pipe, data, model = places
    slices, rest = divmod(model.size, pipe.size) if len(model.axes) > 1 else (model.size, 0)
    sizes = {"pipe": pipe.size, "data": data.size, "model": slices}
    if rest or math.prod(sizes.values()) != world.size:
        msg = (
            f"mpu: {_shown(sizes)} make {math.prod(sizes.values())} ranks, the job has {world.size}; further axes, "
            "as of experts or sequences, cannot come from an mpu"
        )
        raise ConfigError(msg)
    return sizes


def _misfit(order: tuple[str, ...], sizes: Mapping[str, int], places: Sequence[_Place], rank: int) -> str:
    """The contradiction between this rank's place and a grid of this order, or ""."""
    grid = Topology({axis: sizes[axis] for axis in order})
    for place in places:
        expected, name = list(grid.peers(rank, place.axes)), " and ".join(place.axes)
        if place.ranks is not None and place.ranks != expected:
            return f"rank {rank} would be in the {name} group {expected}, the mpu says {place.ranks}"
        if grid.index(rank, place.axes) != place.index:
            return f"rank {rank} would be at {grid.index(rank, place.axes)} of {name}, the mpu says {place.index}"
    return ""


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "none"
