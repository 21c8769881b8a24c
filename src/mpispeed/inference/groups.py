"""Groups of ranks: tensor groups, which share each layer, and data groups across them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, TopologyError
from mpispeed.mesh.foreign_groups import ranks_of
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.plan.mpu import axes_of

if TYPE_CHECKING:
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)


def make_mesh(world: World, size: int | None, *, mpu: Any = None, tp_group: Any = None) -> Mesh:
    """The axes "data" and "model" over all ranks; ranks with slices of the same layers are neighbours.

    Args:
        world: all ranks.
        size: ranks that share each layer; None: those of the given groups, or one.
        mpu: an object with the groups of ranks, as Megatron's and DeepSpeed's.
        tp_group: the ranks that share layers with this one.

    Collective over: all ranks.

    Raises:
        ConfigError: on all ranks, if groups cannot be read, or are no grid of equal groups.
        TopologyError: on all ranks, if the sizes do not multiply to the number of ranks.
    """
    if mpu is not None:
        axes = _of_mpu(mpu, world)
    elif tp_group is not None:
        axes = _of_group(tp_group, world)
    else:
        axes = {"data": world.size // (size or 1), "model": size or 1}
        if world.size % axes["model"]:
            whole = ", ".join(str(n) for n in range(1, world.size + 1) if world.size % n == 0)
            msg = f"tensor_parallel.tp_size {size} does not divide the {world.size} ranks; use one of {whole}"
            raise _alike(TopologyError(msg))
    if size not in (None, axes["model"]):
        msg = f"tensor_parallel.tp_size is {size}, but the given groups have {axes['model']} ranks; leave it out"
        raise _alike(ConfigError(msg))
    mesh = Mesh(Topology(axes), world)
    _tell_far(mesh)
    return mesh


def _of_mpu(mpu: Any, world: World) -> dict[str, int]:
    axes = axes_of(mpu, world)
    if axes.get("pipe", 1) > 1:
        msg = f"the mpu has {axes['pipe']} pipeline stages; models answer as a whole here, so give one without"
        raise _alike(ConfigError(msg))
    return {name: axes[name] for name in axes if name != "pipe"}


def _of_group(group: Any, world: World) -> dict[str, int]:
    """Axes that make the given groups: of neighbours, or of every n-th rank. Collective over: all ranks."""
    ranks = ranks_of(group)
    text = f"tensor_parallel.tp_group: a {type(group).__name__} does not tell its ranks; give a list of them"
    world.comm.agree(ranks is not None, text, ConfigError)
    found: list[list[int]] = world.comm.gather_objects(ranks)
    size = len(found[0])
    for names in (("data", "model"), ("model", "data")):
        sizes = {"model": size, "data": world.size // max(size, 1)}
        grid = Topology({name: sizes[name] for name in names}) if size * sizes["data"] == world.size else None
        if grid is not None and all(list(grid.peers(rank, "model")) == found[rank] for rank in range(world.size)):
            return {name: sizes[name] for name in names}
    shown = "; ".join(f"rank {rank} {ranks[:8]}" for rank, ranks in list(enumerate(found))[:8])
    msg = (
        "tensor_parallel.tp_group: the groups of all ranks have to be of one size, each of neighbours or of every n-th "
        f"rank, and hold the rank that gives them; found {shown}"
    )
    raise _alike(ConfigError(msg))


def _tell_far(mesh: Mesh) -> None:
    """One warning where ranks that share layers are on several nodes."""
    near = set(mesh.world.node.ranks)
    if mesh.rank == 0 and not set(mesh["model"].ranks) <= near:
        log.warning(
            "the %d ranks that share each layer are on several nodes: every layer waits for the network twice; a "
            "tensor_parallel.tp_size that divides the ranks of a node is faster, if the model fits",
            mesh["model"].size,
        )


def _alike(error: ConfigError) -> ConfigError:
    error.is_collective = True
    return error
