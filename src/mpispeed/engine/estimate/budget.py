"""Prediction of a configuration's cost: bytes held by each rank, and bytes sent by it in a step.

Nothing is measured or allocated. Units are made as in the engine, from a model on torch's meta device; placements are
counted on a topology; gathers follow the engine's own policy (`engine.estimate.dry_run`).

Sources. Placements: Rajbhandari et al., "ZeRO", SC20; second copies and quantized messages: Wang et al., ZeRO++,
arXiv 2306.10209; sharding over a part of the ranks: Zhang et al., MiCS, arXiv 2205.00119.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.engine.estimate.dry_run import Buffers, DryRun, Outcome, PaperParams
from mpispeed.engine.estimate.inputs import EstimateInputs, gather_inputs
from mpispeed.engine.estimate.traffic import (
    Moved,
    collecting_bytes,
    gather,
    is_coded_sum,
    moved,
    rest_bytes,
    sent_gradients,
    sent_shared,
    sent_updates,
    sum_error_bytes,
    update_tier,
)
from mpispeed.exchange.cost import Phase, Sent
from mpispeed.mesh.collectives.host_collectives import HALF_FLOATS
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.grad_shards import WRITES_BEHIND
from mpispeed.sharding.leaf import is_leaf
from mpispeed.sharding.module_units import find_module_units
from mpispeed.sharding.prefetch import Limits
from mpispeed.store.placement import Tier
from mpispeed.store.tiers import GRAD, MASTER, PARAM

if TYPE_CHECKING:
    from mpispeed.sharding.module_units import ModuleUnits
    from mpispeed.store.layout import Unit

__all__ = ["Budget", "EstimateInputs", "Held", "Moved", "Phase", "Sent", "gather_inputs", "predict"]

NORM_BYTES = 512
"""Bytes that each rank contributes to the exact sum of squares of all gradients (`sharding.grad_shards`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one kind of model state on one rank and tier."""

    what: str
    tier: Tier
    bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The prediction for one rank.

    Attributes:
        held: model states while training, without activations.
        sent: traffic of one optimizer step, once the order of use is known; where exchanges differ by step, of
            one in full precision.
        build_bytes: peak while the engine takes the model over.
        lag_bytes: part of the gradient buckets that is held only if reductions lag behind the backward pass.
        moved: traffic between tiers in one optimizer step.
        file_bytes: size of swap files in whole pages; `held` has the exact sizes of the states in them.
        phases: kinds of steps where exchanges differ, by their traffic; the first is that of `sent`.
    """

    held: tuple[Held, ...]
    sent: tuple[Sent, ...]
    build_bytes: int
    lag_bytes: int = 0
    moved: tuple[Moved, ...] = ()
    file_bytes: int = 0
    phases: tuple[Phase, ...] = ()

    def bytes_of(self, what: str) -> int:
        """Bytes of one kind of state over all tiers."""
        return sum(row.bytes for row in self.held if row.what == what)

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes on one tier."""
        return sum(row.bytes for row in self.held if row.tier == tier)

    def sent_bytes(self, verb: str | None = None) -> int:
        """Bytes sent in one optimizer step by one verb, or by all."""
        return sum(row.bytes for row in self.sent if verb in (None, row.verb))

    def moved_bytes(self, source: Tier, target: Tier) -> int:
        """Bytes from one tier to another in one optimizer step."""
        return sum(row.bytes for row in self.moved if (row.source, row.target) == (source, target))

    def memory_bytes(self) -> dict[str, int]:
        """Host memory of one rank by kind of state; without an accelerator the device tier is host memory."""
        found: dict[str, int] = {}
        for row in self.held:
            if row.tier != Tier.NVME:
                found[row.what] = found.get(row.what, 0) + row.bytes
        return found


# -- prediction ------------------------------------------------------------------------------------------------------


def predict(facts: EstimateInputs) -> Budget:
    """Predict the bytes held by one rank, and the bytes that it sends in one optimizer step.

    Raises:
        ConfigError: a shard of a unit is longer than the buffers between files and memory.
    """
    users = find_module_units(
        facts.model, facts.table, needs=lambda unit: not unit.states.param.is_replicated, is_whole=is_leaf
    )
    played = facts
    if facts.gathers_once:  # each unit is gathered once and stays unsharded
        played = replace(facts, micro_steps=1, limits=Limits(ahead=0, live=1 << 60, reuse=1 << 60))
    outcome = _rehearse(played, users)
    gathered_bytes, bucket_bytes = outcome.gathered_bytes, outcome.scratch_bytes - outcome.gathered_bytes
    if facts.gathers_once:  # what is gathered is held until the sums are done
        gathered_bytes = _held_bytes(facts)
        bucket_bytes = _rehearse(facts, users, fetches=False).scratch_bytes
    prompt = _rehearse(replace(played, is_overlapped=False), users) if facts.is_overlapped else outcome
    held = [*_held_at_rest(facts), *_buffers(facts)]
    device = Tier.DEVICE
    held.append(Held("pieces of updated parameters", device, collecting_bytes(facts)))
    held.append(Held("gathered parameters", device, gathered_bytes))
    held.append(Held("gradient buckets", device, bucket_bytes))
    gathers = [Sent("parameters", verb, axes, count) for (verb, axes), count in sorted(outcome.gathers.items())]
    norm = [*sent_shared(facts), *_sent_norm(facts)]
    updates = list(sent_updates(facts))
    sent = _summed([*sent_gradients(facts), *gathers, *updates, *norm])
    phases = facts.exchange.phases(facts, sent, updates, [*gathers, *norm])
    return Budget(
        held=tuple(row for row in held if row.bytes),
        sent=sent,
        build_bytes=_build_bytes(facts),
        lag_bytes=outcome.scratch_bytes - prompt.scratch_bytes,
        moved=tuple(moved(facts, _fetches(facts, outcome))),
        file_bytes=sum(facts.swap.file_bytes.values()),
        phases=tuple(replace(phase, sent=_summed(phase.sent)) for phase in phases),
    )


def _sent_norm(facts: EstimateInputs) -> Iterable[Sent]:
    ranks = facts.topology.size
    if facts.table.units or isinstance(facts.model, PipelineModule):  # a stage may have nothing to add
        sizes = {axis: facts.topology.group_size(axis) for axis in ("pipe", "data", "model")}
        axes = tuple(axis for axis in facts.topology.names if sizes.get(axis, 1) > 1 or axis not in sizes)
        axes = ("data",) if ranks == sizes["data"] else axes
        yield Sent("gradient norm", "all_gather", axes, NORM_BYTES * (ranks - 1))


def _held_bytes(facts: EstimateInputs) -> int:
    """Bytes of parameters that stay gathered during a whole step."""
    cut = [unit for unit in facts.table.all_units if not unit.states.param.is_replicated]
    return sum(unit.layout.padded * unit.states.compute.itemsize for unit in cut)


def _fetches(facts: EstimateInputs, outcome: Outcome) -> Mapping[int, int]:
    """Reads of this rank's shards by unit index; gathers from fresh second copies do not count."""
    found: dict[int, int] = {}
    for (index, is_fresh), count in outcome.fetches.items():
        if not (is_fresh and facts.table.all_units[index].states.second is not None):
            found[index] = found.get(index, 0) + count
    return found


def _held_at_rest(facts: EstimateInputs) -> Iterable[Held]:
    total: dict[tuple[str, Tier], int] = {}

    def add(what: str, tier: Tier, count_bytes: int) -> None:
        total[what, tier] = total.get((what, tier), 0) + count_bytes

    for unit in facts.table.all_units:
        add("parameters", unit.states.param.tier, rest_bytes(facts, unit))
        if unit.states.second is not None:
            size = facts.span(unit, unit.states.second) * unit.states.compute.itemsize
            add("second copies", unit.states.second.tier, size)
    add("outside of units", Tier.DEVICE, _outside_bytes(facts, is_cast=True))
    for unit in facts.table.units:
        master, span = unit.states.full, facts.span(unit, unit.states.master)
        add("masters", unit.states.master.tier, 0 if unit.states.master_is_param else span * master.itemsize)
        add("optimizer state", unit.states.master.tier, span * facts.state_bytes * master.itemsize // 4)
        add("gradients", unit.states.grad.tier, facts.span(unit, unit.states.grad) * unit.states.accumulate.itemsize)
        for what, count_bytes in facts.exchange.held(facts, unit):
            add(what, update_tier(unit), count_bytes)
        add("errors of quantized sums", Tier.DEVICE, sum_error_bytes(facts, unit, 8))
    for what in dict.fromkeys(what for what, _ in total):
        for tier in Tier:
            yield Held(what, tier, total.get((what, tier), 0))


def _buffers(facts: EstimateInputs) -> Iterable[Held]:
    """Buffers between files and memory, all in use, and the copy for a background checkpoint."""
    swap = facts.swap
    yield Held("parameter buffers", Tier.HOST, swap.param_buffers * swap.param_bytes)
    if swap.window_kinds:
        widest = max(dtype.itemsize for _, dtype in swap.tensors.values())
        count = len(swap.window_kinds) * swap.in_flight
        yield Held(
            "update buffers", Tier.HOST, facts.exchange.buffer_bytes(facts, count * swap.window_elements * widest)
        )
    # States in swap files cannot be copied: such checkpoints are written in the foreground.
    if facts.copies_checkpoint and not swap.file_bytes:
        yield Held("checkpoint copy", Tier.HOST, sum(_saved_bytes(facts, unit) for unit in facts.table.all_units))


def _saved_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Bytes of a unit that one rank writes into a checkpoint: an equal part, whatever it holds."""
    part = unit.layout.padded // facts.topology.group_size("data")
    compute, master = unit.states.compute, unit.states.full
    if not unit.is_trainable:
        return part * compute.itemsize
    errors = facts.exchange.saved_bytes(facts, unit) + sum_error_bytes(facts, unit, 32)
    return part * (master.itemsize + facts.state_bytes * master.itemsize // 4) + errors


def _outside_bytes(facts: EstimateInputs, *, is_cast: bool) -> int:
    """Bytes of frozen parameters that are in no unit, and of buffers."""
    frozen = [param for param in facts.model.parameters() if facts.table.locate(param) is None]
    total = 0
    for tensor in (*frozen, *facts.model.buffers()):
        changes = is_cast and facts.compute is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        dtype = facts.compute if changes and facts.compute is not None else tensor.dtype
        total += tensor.numel() * dtype.itemsize
    return total


def _build_bytes(facts: EstimateInputs) -> int:
    """Peak bytes while units are taken over from the model, one after the other."""
    sizes = {id(param): math.prod(param.shape) * param.dtype.itemsize for param in facts.model.parameters()}
    held = sum(sizes.values()) + sum(buffer.nbytes for buffer in facts.model.buffers())
    if facts.is_init_sharded:
        held -= sum(sizes[id(param)] for unit in facts.table.all_units for param in unit.params)
        held += sum(facts.span(unit, unit.states.param) * unit.dtype.itemsize for unit in facts.table.all_units)
    most = held
    for unit in facts.table.all_units:
        compute, master = unit.states.compute, unit.states.full
        source = unit.layout.padded * unit.dtype.itemsize
        rest = facts.span(unit, unit.states.param) * compute.itemsize
        is_source = unit.states.param.is_replicated and compute == unit.dtype
        has_masters = unit.is_trainable and not unit.states.master_is_param
        masters = facts.span(unit, unit.states.master) * master.itemsize if has_masters else 0
        made = rest + masters
        gathered = source if facts.is_init_sharded and not unit.states.param.is_replicated else 0
        most = max(most, held + source + gathered + made - (rest if is_source else 0))
        given = sum(sizes[id(param)] for param in unit.params)
        init_shard = facts.span(unit, unit.states.param) * unit.dtype.itemsize
        written = sum(
            size for kind, size in ((PARAM, rest), (MASTER, masters)) if (kind, unit.index) in facts.swap.tensors
        )
        held += made - written - (init_shard if facts.is_init_sharded else given)
    return most


def _summed(rows: Iterable[Sent]) -> tuple[Sent, ...]:
    """One row for each kind of message, without those that send nothing."""
    total: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for row in rows:
        key = row.what, row.verb, row.axes
        total[key] = total.get(key, 0) + row.bytes
    return tuple(Sent(*key, count) for key, count in total.items() if count)


def _rehearse(facts: EstimateInputs, users: list[ModuleUnits], *, fetches: bool = True) -> Outcome:
    params = PaperParams(
        facts.table,
        lambda unit, is_second: gather(facts, unit, is_second=is_second),
    )

    def bucket(unit: Unit) -> Buffers:
        return [] if unit.states.grad.is_replicated else [(unit.layout.padded, unit.states.wire)]

    def wire(unit: Unit, is_added: bool) -> Buffers:
        rests, travels = unit.states.accumulate, unit.states.wire
        found = [(unit.layout.padded, travels)] if unit.states.grad.is_replicated and rests != travels else []
        if is_added:
            found.append((facts.span(unit, unit.states.master), torch.promote_types(rests, travels)))
        sizes = [facts.topology.group_size(axis) for axis in unit.states.master.axes]
        if travels in HALF_FLOATS and facts.scatters and not is_coded_sum(facts, unit):
            # Sums of 16 bits are kept in fp32 between hops.
            spans = [unit.layout.padded // math.prod(sizes[: i + 1]) for i, n in enumerate(sizes) if n > 1]
            found += [(span, torch.float32) for span in spans[:-1][:1]]
        return found

    longest: dict[torch.dtype, int] = {}
    for (kind, _), (numel, dtype) in facts.swap.tensors.items():
        if kind == GRAD:
            longest[dtype] = max(numel, longest.get(dtype, 0))

    def swapped(unit: Unit) -> Buffers:
        dtype = unit.states.accumulate
        return [(longest[dtype], dtype)] if (GRAD, unit.index) in facts.swap.tensors else []

    rehearsal = DryRun(
        facts.model, params, users, facts.limits, bucket=bucket, wire=wire, swapped=swapped,
        writes_behind=WRITES_BEHIND if facts.swap.writes_behind else 0, is_overlapped=facts.is_overlapped,
    )  # fmt: skip
    cuts = fetches and facts.table.shards_params
    return rehearsal.run(facts.micro_steps, reduces_each=facts.table.shards_grads, fetches=cuts)
