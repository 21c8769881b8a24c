"""Swap files of a plan: the units in them, their folders, files and buffers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError, MpispeedError, StoreError
from mpispeed.base.units import format_bytes
from mpispeed.native.block_io import Options
from mpispeed.optim.rule import KeepsState
from mpispeed.plan.offload_plan import make_swap_plan, offload_of, slots_in_files, swapped_cells
from mpispeed.store.placement import Tier
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SwapFolder
from mpispeed.store.tiers import GRAD, MASTER, PARAM, SwapPlan, Tiers

if TYPE_CHECKING:
    from mpispeed.config.offload import Aio
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.plan.plan import Plan
    from mpispeed.store.layout import Table

log = logging.getLogger(__name__)


def is_swapping(plan: Plan) -> bool:
    """True if any state may be in swap files."""
    states = plan.states
    return Tier.NVME in (states.param.tier, states.grad.tier, states.master.tier)


def plan_swap(plan: Plan, mesh: Mesh, table: Table, slots: Sequence[str]) -> SwapPlan:
    """Files and buffers of this rank under the plan; the same units on every rank. `slots`: optimizer states.

    Raises:
        ConfigError: a shard does not fit into a buffer of `offload_param`.
    """
    cells = swapped_cells(table, mesh.topology, slots_in_files(plan.config, slots))
    return make_swap_plan(cells, offload_of(plan.config.zero_optimization), table)


def check_rule(plan: Plan, rule: Rule | None, name: str) -> None:
    """Refuse optimizers that cannot update states in swap files, which are updated window by window.

    Raises:
        ConfigError: the optimizer keeps its state in objects of its own and updates all parameters at once.
    """
    tiers = {"offload_optimizer": plan.states.master.tier, "offload_param": plan.states.param.tier}
    swapped = [f"zero_optimization.{key}.device" for key, tier in tiers.items() if tier is Tier.NVME]
    if swapped and isinstance(rule, KeepsState):
        msg = (
            f"optimizer {name} keeps its state in objects of its own and updates all parameters at once, so that they "
            f"have to be in memory, and {' and '.join(swapped)} is nvme; use Adam, AdamW, Adagrad, Lion, Lamb, Muon or "
            "SGD by name in the config, a class of torch.optim itself that works element by element and has no hooks, "
            "or device cpu"
        )
        raise ConfigError(msg)


def open_tiers(plan: Plan, mesh: Mesh, swap: SwapPlan, table: Table) -> Tiers:
    """Check the disks, then make folders, files and buffers.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a folder cannot be made or written, is too small or does not keep what is
            written.
        StoreError: on every rank, if files cannot be made.
    """
    where = _where(plan, table)
    if not is_swapping(plan):
        return Tiers(**where)
    zero, world, options = plan.config.zero_optimization, mesh.world, io_options(plan.config.aio)
    roots = {kind: _root(zero, kind) for kind in swap.file_bytes}
    run = world.comm.share(run_name() if world.rank == 0 else "")
    everywhere = set[str]().union(*world.comm.gather_objects(set(roots.values())))  # one stage may have nothing to swap
    # Ordered by the text in the config, which is the same on all ranks; links may resolve differently on each node.
    for root in sorted(everywhere):
        wanted = sum(size for kind, size in swap.file_bytes.items() if roots[kind] == root)
        preflight(world.comm, world.node, Path(root), wanted, options)
    folders: dict[Path, SwapFolder] = {}
    with world.comm.together(StoreError, doing=socket.gethostname(), plain=(MpispeedError, OSError)):
        try:
            places = {kind: Path(root).resolve() for kind, root in roots.items()}
            for place in sorted(set(places.values())):
                folders[place] = SwapFolder(place, run, world.rank)
            found = {kind: folders[place] for kind, place in places.items()}
            tiers = Tiers(swap, found, options, others_swap=bool(everywhere), **where)
        except BaseException:
            for folder in folders.values():
                folder.remove()
            raise
    _tell(mesh, tiers)
    return tiers


def _where(plan: Plan, table: Table) -> dict[str, Any]:
    """Arguments of `Tiers`: the device, the states kept in host memory by unit, and the kinds pinned there."""
    zero = plan.config.zero_optimization
    sections = ((zero.offload_param, (PARAM,)), (zero.offload_optimizer, (MASTER, GRAD)))
    pins = [kind for section, kinds in sections if section is not None and section.pin_memory for kind in kinds]
    on_host = {
        (kind, unit.index)
        for unit in table.all_units
        for kind, placement in ((PARAM, unit.states.param), (MASTER, unit.states.master), (GRAD, unit.states.grad))
        if placement.tier is not Tier.DEVICE
    }
    return {"device": plan.device, "on_host": on_host, "pins": pins}


def io_options(aio: Aio) -> Options:
    """The config's `aio` section as I/O options."""
    return Options(
        block_size=aio.block_size,
        queue_depth=aio.queue_depth,
        threads=aio.intra_op_parallelism,
        single_submit=aio.single_submit,
        overlap_events=aio.overlap_events,
        backend=aio.backend,
    )


def _root(zero: Any, kind: str) -> str:
    section = zero.offload_param if kind == PARAM else zero.offload_optimizer
    return str(section.nvme_path)


def _tell(mesh: Mesh, tiers: Tiers) -> None:
    if mesh.rank == 0 and tiers.plan.tensors:
        swap = tiers.plan
        sizes = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in swap.file_bytes.items())
        log.info("%-10s %s on this rank: %s", "swapped", format_bytes(tiers.file_bytes), sizes)
        log.info(
            "%-10s at most %s on this rank; %d windows of %d elements at a time",
            "buffers", format_bytes(tiers.most_buffer_bytes), swap.in_flight, swap.window_elements,
        )  # fmt: skip
