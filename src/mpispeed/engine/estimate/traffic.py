"""Traffic of one rank in one optimizer step: to other ranks, and between its own tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.exchange.cost import Sent
from mpispeed.mesh.collectives.host_collectives import HALF_FLOATS
from mpispeed.mesh.compressed.quantized import gather_bytes, reduce_scatter_bytes
from mpispeed.native.block_quant import default_block
from mpispeed.native.codes import Grid
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.quantized import Codes
from mpispeed.store.layout import BLOCK
from mpispeed.store.placement import REPLICATED, Placement, Tier, moves, reduce_moves

if TYPE_CHECKING:
    import torch

    from mpispeed.engine.estimate.inputs import EstimateInputs
    from mpispeed.store.layout import Unit


_LOSS_BYTES = 8
"""Bytes of a pipeline's loss, of which data ranks take the mean."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank moves between two of its tiers in one optimizer step."""

    what: str
    source: Tier
    target: Tier
    bytes: int


# -- to other ranks --------------------------------------------------------------------------------------------------


def _replicas(facts: EstimateInputs, unit: Unit) -> tuple[str, ...]:
    """Axes along which ranks hold equal parts of masters."""
    states = unit.states
    if states.master.is_replicated:
        return states.partial
    cut = facts.topology.resolve(states.master.axes)
    rest = (axis for axis in facts.topology.resolve(states.partial) if axis not in cut)
    return tuple(axis for axis in rest if facts.topology.group_size(axis) > 1)


def _sums(facts: EstimateInputs, unit: Unit) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """(verb, axes, bytes of the full buffer) of each collective of one reduction, as in `store.transfers.reduce_into`.

    Sums of 16-bit gradients are in fp32 after the first of several hops.
    """
    states, size = unit.states, unit.layout.padded * unit.states.wire.itemsize
    rest = _replicas(facts, unit) if states.grad.is_replicated else ()
    if not facts.scatters:
        axes = facts.topology.resolve(states.partial if states.grad.is_replicated else states.master.axes)
        yield "all_reduce", axes, size
        return
    is_half = states.wire in HALF_FLOATS
    for move in reduce_moves((*states.master.axes, *rest), states.master):
        n = facts.topology.group_size(move.axes)
        yield move.verb, move.axes, size
        if n > 1 and move.verb == "reduce_scatter":
            size = size // n * (2 if is_half else 1)
            is_half = False


def sent_gradients(facts: EstimateInputs) -> Iterable[Sent]:
    """Traffic of reductions: for sharded gradients in every micro-step, and over replicas of the shards once a step."""
    steps = facts.micro_steps if facts.table.shards_grads else 1
    for unit in facts.table.units:
        replicas = () if unit.states.grad.is_replicated else _replicas(facts, unit)
        if is_coded_sum(facts, unit):
            for axis, size in zip(facts.master.axes, _coded_hops(facts, unit), strict=True):
                yield Sent("gradients", "all_to_all", (axis,), steps * size)
        else:
            for verb, axes, size in _sums(facts, unit):
                n = facts.topology.group_size(axes)
                times = 2 if verb == "all_reduce" else 1
                yield Sent("gradients", verb, axes, steps * (times * size * (n - 1) // n))
        n = facts.topology.group_size(replicas)
        part = facts.span(unit, unit.states.master) * unit.states.accumulate.itemsize
        yield Sent("gradients", "all_reduce", replicas, 2 * part * (n - 1) // n)


def sent_shared(facts: EstimateInputs) -> Iterable[Sent]:
    """Traffic of sums over slices and over stages that share a weight, as in `Sharing.sum`, and of losses."""
    model = facts.model
    for unit in facts.table.units:
        part = facts.span(unit, unit.states.master) * unit.states.accumulate.itemsize
        for copies in unit.states.copies:
            if copies.key and isinstance(model, PipelineModule):
                n = len(model.tied(copies.key).stages)
                axes = ("pipe",) if n == model.num_stages else (f"tied {copies.key}",)
                yield Sent("gradients of shared weights", "all_reduce", axes, 2 * part * (n - 1) // n)
            elif copies.is_partial:
                n = facts.topology.group_size(copies.axis)
                yield Sent("gradients of slices", "all_reduce", (copies.axis,), 2 * part * (n - 1) // n)
    if isinstance(model, PipelineModule) and model.stage_id == model.num_stages - 1:
        n = facts.topology.group_size("data")
        yield Sent("losses", "all_reduce", ("data",), 2 * _LOSS_BYTES * (n - 1) // n)


def is_coded_sum(facts: EstimateInputs, unit: Unit) -> bool:
    """True if the unit's reduction is quantized, as `sharding.quantized.QuantizedReducer` decides."""
    is_made_of_vectors = all(len(entry.shape) < 2 for entry in unit.layout.entries)
    is_common = unit.states.master.axes == facts.master.axes
    return facts.codes_grads and unit.states.wire.itemsize <= 4 and not is_made_of_vectors and is_common


def _coded_hops(facts: EstimateInputs, unit: Unit) -> tuple[int, int]:
    """Bytes of the two hops of a quantized reduction."""
    inner, outer = (facts.topology.group_size(axis) for axis in facts.master.axes)
    return reduce_scatter_bytes(facts.span(unit, unit.states.master), inner, outer, BLOCK)


def sum_error_bytes(facts: EstimateInputs, unit: Unit, bits: int) -> int:
    """Bytes of the errors of quantized sums at so many bits: a full buffer, and in nodes of several ranks a part of it.

    With 8 bits blocks have fp32 scales; 32 bits are those of a checkpoint.
    """
    if not (facts.keeps_sum_errors and is_coded_sum(facts, unit)):
        return 0
    inner, outer = (facts.topology.group_size(axis) for axis in facts.master.axes)
    piece = facts.span(unit, unit.states.master)
    grids = [Grid(piece, BLOCK, inner * outer)] + [Grid(piece, BLOCK, outer)] * (inner > 1)
    return sum(grid.nbytes(8) if bits == 8 else grid.numel * bits // 8 for grid in grids)


def sent_updates(facts: EstimateInputs) -> Iterable[Sent]:
    """Traffic from updated masters to the parameters' placement."""
    for unit in facts.table.units:
        itemsize = unit.states.compute.itemsize
        for _, axes, elements in _widening(facts, unit, unit.states.master, unit.states.param):
            n = facts.topology.group_size(axes)
            verb, sent = facts.collecting.sent(elements // n, n)
            yield Sent("updated parameters", verb, axes, sent * itemsize)


def collecting_bytes(facts: EstimateInputs) -> int:
    """Bytes of the buffers in which pieces of updated parameters arrive; they are kept from step to step."""
    buffers: set[tuple[torch.dtype, int]] = set()
    for unit in facts.table.units:
        for _, axes, elements in _widening(facts, unit, unit.states.master, unit.states.param):
            n = facts.topology.group_size(axes)
            buffers.add((unit.states.compute, facts.collecting.buffer_elements(elements // n, n)))
    return sum(dtype.itemsize * numel for dtype, numel in buffers)


def _widening(
    facts: EstimateInputs, unit: Unit, source: Placement, target: Placement
) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """(verb, axes, elements of the result) of each collective, as in `store.transfers.all_gather_into`."""
    held = facts.span(unit, source)
    for move in moves(Placement(source.axes), Placement(target.axes)):
        held *= facts.topology.group_size(move.axes)
        yield move.verb, move.axes, held


def gather(facts: EstimateInputs, unit: Unit, *, is_second: bool) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """(verb, axes, bytes) of the collectives that gather a unit; second copies are never quantized."""
    second = unit.states.second if is_second else None
    source = unit.states.param if second is None else second
    steps = list(_widening(facts, unit, source, REPLICATED))
    sizes = [facts.topology.group_size(axes) for _, axes, _ in steps]
    count, itemsize = facts.span(unit, source), unit.states.compute.itemsize
    is_coded = facts.codes_params or unit.states.is_coded
    if is_coded and second is None and Codes.takes(unit.states.compute):
        sent = gather_bytes(count, sizes, default_block(count))
    else:
        sent = tuple(elements * itemsize * (n - 1) // n for (_, _, elements), n in zip(steps, sizes, strict=True))
    for (verb, axes, _), size in zip(steps, sent, strict=True):
        yield verb, axes, size


def rest_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Bytes of this rank's shard of a unit's parameters."""
    count, dtype = facts.span(unit, unit.states.param), unit.states.compute
    if unit.states.is_coded:
        return Grid(count, default_block(count)).nbytes(8)
    return count * dtype.itemsize


# -- between tiers -----------------------------------------------------------------------------------------------------

_LADDER = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def moved(facts: EstimateInputs, fetches: Mapping[int, int]) -> list[Moved]:
    """Traffic between neighbouring tiers; a move between device and files counts for both of its hops.

    Args:
        facts: inputs of the prediction.
        fetches: unit index -> reads of this rank's shard for gathers.
    """
    total: dict[tuple[str, Tier, Tier], int] = {}

    def move(what: str, source: Tier, target: Tier, count_bytes: int) -> None:
        start, end = _LADDER.index(source), _LADDER.index(target)
        step = 1 if end > start else -1
        for place in range(start, end, step):
            key = what, _LADDER[place], _LADDER[place + step]
            total[key] = total.get(key, 0) + count_bytes

    for unit in facts.table.all_units:
        count = fetches.get(unit.index, 0)
        move("parameters", unit.states.param.tier, Tier.DEVICE, count * rest_bytes(facts, unit))
    for unit in facts.table.units:
        _move_update(facts, unit, move)
        _move_gradients(facts, unit, move)
    rows = (Moved(*key, count_bytes) for key, count_bytes in total.items() if count_bytes)
    return sorted(rows, key=lambda row: (row.what, _LADDER.index(row.source), _LADDER.index(row.target)))


Move = Callable[[str, Tier, Tier, int], None]


def update_tier(unit: Unit) -> Tier:
    """Tier on which the optimizer runs: the host for states in files."""
    return Tier.DEVICE if unit.states.master.tier == Tier.DEVICE else Tier.HOST


def _move_update(facts: EstimateInputs, unit: Unit, move: Move) -> None:
    """States to the optimizer and back, and updated parameters to their tier."""
    span = facts.span(unit, unit.states.master)
    compute, master, runs = unit.states.compute, unit.states.full, update_tier(unit)
    states = {"optimizer state": facts.state_bytes * master.itemsize // 4}
    if unit.states.master_is_param:
        move("updated parameters", unit.states.param.tier, runs, span * compute.itemsize)
    else:
        states["masters"] = master.itemsize
    move("updated parameters", runs, unit.states.param.tier, span * compute.itemsize)
    for what, size in states.items():
        move(what, unit.states.master.tier, runs, span * size)
        move(what, runs, unit.states.master.tier, span * size)


def _move_gradients(facts: EstimateInputs, unit: Unit, move: Move) -> None:
    """Reduced gradients to their tier in every micro-step, and from there to the optimizer."""
    rests, runs = unit.states.grad.tier, update_tier(unit)
    size = facts.span(unit, unit.states.master) * unit.states.accumulate.itemsize
    times = 0 if unit.states.grad.is_replicated else facts.micro_steps
    move("gradients", Tier.DEVICE, rests, times * size)
    if rests == Tier.NVME:
        move("gradients", rests, Tier.HOST, max(times - 1, 0) * size)  # read back to be added to
    move("gradients", rests, runs, size)
