"""Swap files of a plan: the units in them, their folders, files and buffers."""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError, MpispeedError, StoreError
from mpispeed.base.units import format_bytes
from mpispeed.native.block_io import Options
from mpispeed.optim.rule import KeepsState
from mpispeed.plan.offload_plan import leading_units, make_swap_plan, offload_of
from mpispeed.sharding.quantized import Codes
from mpispeed.store.placement import Tier
from mpispeed.store.preflight import preflight
from mpispeed.store.swap import SwapFolder, run_name
from mpispeed.store.tiers import GRAD, MASTER, PARAM, SwapPlan, Tiers
from mpispeed.store.transfers import own_span

if TYPE_CHECKING:
    from mpispeed.config.offload import Aio
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Rule
    from mpispeed.plan.plan import Plan
    from mpispeed.store.layout import Table, Unit

log = logging.getLogger(__name__)

Kept = tuple[tuple[str, int], tuple[int, torch.dtype]]
"""(kind, unit index), (elements, dtype)."""


def is_swapping(plan: Plan) -> bool:
    """True if any state may be in swap files."""
    states = plan.states
    return Tier.NVME in (states.param.tier, states.grad.tier, states.master.tier)


def plan_swap(
    plan: Plan,
    mesh: Mesh,
    table: Table,
    resident: Collection[int],
    compute: torch.dtype | None,
    slots: Sequence[str],
    *,
    own_masters: bool = False,
) -> SwapPlan:
    """Files and buffers of this rank under the plan; the same units on every rank.

    Args:
        plan: the placements and their tiers.
        mesh: the ranks.
        table: the units.
        resident: indices of units whose parameters stay unsharded in memory.
        compute: dtype to compute in; None: that of each unit.
        slots: names of the optimizer's states.
        own_masters: masters are not the parameters, even if they have their dtype.

    Raises:
        ConfigError: a shard does not fit into a buffer of `offload_param`.
    """
    holders: dict[tuple[str, int], tuple[int, torch.dtype]] = {}
    if plan.states.param.tier is Tier.NVME:
        holders.update(_param_cells(plan, mesh, table, resident, compute))
    if plan.states.master.tier is Tier.NVME:
        holders.update(_state_cells(plan, mesh, table, compute, slots, own_masters=own_masters))
    return make_swap_plan(holders, offload_of(plan.config.zero_optimization), table)


def _dtypes(plan: Plan, unit: Unit, compute: torch.dtype | None) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Compute, master and accumulation dtype."""
    if unit.dtype == torch.float64 or not unit.dtype.is_floating_point:
        return unit.dtype, unit.dtype, torch.float64
    accumulate = plan.policy.accumulate if plan.config.data_types.grad_accum_dtype else torch.float32
    return unit.dtype if compute is None else compute, torch.float32, accumulate


def _param_cells(
    plan: Plan, mesh: Mesh, table: Table, resident: Collection[int], compute: torch.dtype | None
) -> Iterator[Kept]:
    """Shards beyond the first `max_in_cpu` elements; quantized frozen units are small and stay in memory."""
    zero = plan.config.zero_optimization
    shards = []
    for unit in table.all_units:
        dtype = _dtypes(plan, unit, compute)[0]
        is_coded = zero.zero_quantized_nontrainable_weights and not unit.is_trainable and Codes.takes(dtype)
        if unit.index not in resident and not is_coded:
            shards.append((unit.index, own_span(mesh, plan.states.param, unit.layout.padded).numel, dtype))
    kept = leading_units(((index, numel) for index, numel, _ in shards), offload_of(zero).memory_elements)
    return (((PARAM, index), (numel, dtype)) for index, numel, dtype in shards if index not in kept)


def _state_cells(
    plan: Plan, mesh: Mesh, table: Table, compute: torch.dtype | None, slots: Sequence[str], *, own_masters: bool
) -> Iterator[Kept]:
    """Masters, optimizer states and sharded gradients of the first units, which hold `ratio` of all elements."""
    total = sum(unit.layout.padded for unit in table.units)
    ratio = offload_of(plan.config.zero_optimization).ratio
    chosen = leading_units(((unit.index, unit.layout.padded) for unit in table.units), ratio * total)
    # On a device, parameters of the same dtype that stay there cannot be the masters.
    is_apart = own_masters or (plan.device.type != "cpu" and plan.states.param.tier is Tier.DEVICE)
    for unit in table.units:
        if unit.index not in chosen:
            continue
        span = own_span(mesh, plan.states.master, unit.layout.padded).numel
        own, master, accumulate = _dtypes(plan, unit, compute)
        if own != master or is_apart:
            yield (MASTER, unit.index), (span, master)
        for slot in slots:
            yield (slot, unit.index), (span, master)
        if plan.states.grad.tier is Tier.NVME:
            yield (GRAD, unit.index), (own_span(mesh, plan.states.grad, unit.layout.padded).numel, accumulate)


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
            f"have to be in memory, and {' and '.join(swapped)} is nvme; use Adam, AdamW, Adagrad, Lion, Lamb or SGD "
            "by name in the config, a class of torch.optim itself that works element by element and has no hooks, "
            "or device cpu"
        )
        raise ConfigError(msg)


def open_tiers(plan: Plan, mesh: Mesh, swap: SwapPlan) -> Tiers:
    """Check the disks, then make folders, files and buffers.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a folder cannot be made or written, is too small or does not keep what is
            written.
        StoreError: on every rank, if files cannot be made.
    """
    where = _where(plan)
    if not is_swapping(plan):
        return Tiers(**where)
    zero, world, options = plan.config.zero_optimization, mesh.world, io_options(plan.config.aio)
    roots = {kind: _root(zero, kind) for kind in swap.file_bytes}
    run = world.comm.share(run_name() if world.rank == 0 else "")
    # Ordered by the text in the config, which is the same on all ranks; links may resolve differently on each node.
    for root in sorted(set(roots.values())):
        wanted = sum(size for kind, size in swap.file_bytes.items() if roots[kind] == root)
        preflight(world.comm, world.node, Path(root), wanted, options)
    folders: dict[Path, SwapFolder] = {}
    with world.comm.together(StoreError, doing=socket.gethostname(), plain=(MpispeedError, OSError)):
        try:
            places = {kind: Path(root).resolve() for kind, root in roots.items()}
            for place in sorted(set(places.values())):
                folders[place] = SwapFolder(place, run, world.rank)
            tiers = Tiers(swap, {kind: folders[place] for kind, place in places.items()}, options, **where)
        except BaseException:
            for folder in folders.values():
                folder.remove()
            raise
    _tell(mesh, tiers)
    return tiers


def _where(plan: Plan) -> dict[str, Any]:
    """Arguments of `Tiers`: the device, the kinds of state kept in host memory, and those pinned there."""
    states, zero = plan.states, plan.config.zero_optimization
    tiers = {PARAM: states.param.tier, MASTER: states.master.tier, GRAD: states.grad.tier}
    sections = ((zero.offload_param, (PARAM,)), (zero.offload_optimizer, (MASTER, GRAD)))
    pins = [kind for section, kinds in sections if section is not None and section.pin_memory for kind in kinds]
    on_host = [kind for kind, tier in tiers.items() if tier is not Tier.DEVICE]
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
    if mesh.rank == 0 and tiers.is_swapping:
        swap = tiers.plan
        sizes = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in swap.file_bytes.items())
        log.info("%-10s %s on this rank: %s", "swapped", format_bytes(tiers.file_bytes), sizes)
        log.info(
            "%-10s at most %s on this rank; %d windows of %d elements at a time",
            "buffers", format_bytes(tiers.most_buffer_bytes), swap.in_flight, swap.window_elements,
        )  # fmt: skip
