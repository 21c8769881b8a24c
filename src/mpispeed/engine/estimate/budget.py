"""Prediction of a configuration's cost: bytes held by each rank, and bytes sent by it in a step.

Nothing is measured or allocated: the engine's own parts make some steps on torch's meta device, over a mesh on which
nothing moves (`engine.estimate.dry_run`); what they hold and send is read off.

Sources. Placements: Rajbhandari et al., "ZeRO", SC20; second copies and quantized messages: Wang et al., ZeRO++,
arXiv 2306.10209; sharding over a part of the ranks: Zhang et al., MiCS, arXiv 2205.00119.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.engine.estimate.dry_run import Outcome, rehearse
from mpispeed.engine.estimate.inputs import EstimateInputs, gather_inputs
from mpispeed.engine.estimate.traffic import Moved, moved, update_tier
from mpispeed.exchange.cost import Phase, Sent
from mpispeed.plan.mixed import find_norms
from mpispeed.store.coded_tensor import WINDOW
from mpispeed.store.placement import Tier
from mpispeed.store.tiers import MASTER, PARAM

if TYPE_CHECKING:
    from mpispeed.engine.estimate.owners import Owners
    from mpispeed.store.layout import Unit

__all__ = ["Budget", "EstimateInputs", "Held", "Moved", "Phase", "Sent", "gather_inputs", "predict"]

PURPOSES = (
    "gradients", "parameters", "updated parameters", "matrices to owners and back", "gradients of shared weights",
    "losses", "gradient norm", "losses of micro-batches",
)  # fmt: skip
"""Order of the kinds of messages."""


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
        owners: of matrices that are updated as wholes.
    """

    held: tuple[Held, ...]
    sent: tuple[Sent, ...]
    build_bytes: int
    lag_bytes: int = 0
    moved: tuple[Moved, ...] = ()
    file_bytes: int = 0
    phases: tuple[Phase, ...] = ()
    owners: tuple[Owners, ...] = ()

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
    outcome = rehearse(facts)
    prompt = outcome
    if facts.is_overlapped and facts.table.shards_grads:  # more than two micro-steps hold no more than two
        enough = facts.micro_steps if facts.plan.slots is not None else min(facts.micro_steps, 2)
        prompt = rehearse(replace(facts, is_overlapped=False, micro_steps=enough))
    params, gathered_bytes = outcome.params, outcome.gathered_bytes
    held = [*_held_at_rest(facts, outcome), *_buffers(facts, outcome)]
    held.append(Held("pieces of updated parameters", Tier.DEVICE, params.collector.arena.owned_bytes))
    held.append(Held("gathered parameters", Tier.DEVICE, gathered_bytes))
    is_on_host = any(update_tier(unit) is Tier.HOST for unit in facts.table.units)
    held.append(Held("matrices under way", Tier.HOST if is_on_host else Tier.DEVICE, outcome.matrices.peak_bytes))
    held.append(Held("sums of micro-batches", Tier.DEVICE, outcome.slot_bytes))
    held.append(Held("gradient buckets", Tier.DEVICE, outcome.scratch_bytes - gathered_bytes - outcome.slot_bytes))
    sent = {what: _rows(outcome, what) for what in PURPOSES}
    full = [row for rows in sent.values() for row in rows]
    updates = sent.pop("updated parameters")
    del sent["gradients"]
    phases = facts.exchange.phases(facts, full, updates, [row for rows in sent.values() for row in rows])
    return Budget(
        held=tuple(row for row in held if row.bytes),
        sent=tuple(full),
        build_bytes=_build_bytes(facts),
        lag_bytes=outcome.scratch_bytes - prompt.scratch_bytes,
        moved=tuple(moved(facts, params)),
        file_bytes=sum(facts.swap.file_bytes.values()),
        phases=tuple(replace(phase, sent=_summed(phase.sent)) for phase in phases),
        owners=outcome.matrices.owners,
    )


def _rows(outcome: Outcome, what: str) -> list[Sent]:
    found = ((key, size, outcome.messages[key]) for key, size in outcome.sent.items() if key[0] == what and size)
    return [Sent(*key, size, count) for key, size, count in sorted(found)]


def _held_at_rest(facts: EstimateInputs, outcome: Outcome) -> Iterable[Held]:
    total: dict[tuple[str, Tier], int] = {}
    scratch = dict.fromkeys(Tier, 0)
    params, shards = outcome.params, outcome.grads.shards

    def add(what: str, tier: Tier, count_bytes: int) -> None:
        total[what, tier] = total.get((what, tier), 0) + count_bytes

    for unit in facts.table.all_units:
        add("parameters", unit.states.param.tier, params.rest_bytes(unit))
    add("second copies", Tier.DEVICE, params.second_bytes)
    add("outside of units", Tier.DEVICE, _outside_bytes(facts))
    for unit in facts.table.units:
        states, master, gradients = unit.states, params.stored_master(unit), shards.stored(unit)[0]
        is_param = states.master_is_param and states.codes.master is None
        add("masters", states.master.tier, 0 if is_param else master.memory_bytes + master.file_bytes)
        state_bytes, scale_bytes = facts.state_sizes(unit, master.numel)
        add("optimizer state", facts.state_tier(unit), state_bytes - scale_bytes)
        add("optimizer state", update_tier(unit), scale_bytes)
        coded = [*filter(None, (states.codes.master, *map(states.codes.slot, states.slots_among(facts.slots))))]
        if coded:
            scratch[update_tier(unit)] = max(scratch[update_tier(unit)], len(coded) * 4 * min(master.numel, WINDOW))
        add("gradients", states.grad.tier, gradients.memory_bytes + gradients.file_bytes)
        for what, count_bytes in facts.exchange.held(facts, unit):
            add(what, update_tier(unit), count_bytes)
    for tier, size in scratch.items():
        add("decoded states", tier, size)
    add("errors of quantized sums", Tier.DEVICE, outcome.error_bytes)
    for what in dict.fromkeys(what for what, _ in total):
        for tier in Tier:
            yield Held(what, tier, total.get((what, tier), 0))


def _buffers(facts: EstimateInputs, outcome: Outcome) -> Iterable[Held]:
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
    if facts.plan.config.checkpoint.async_save and not swap.file_bytes:
        size = 4 * outcome.error_elements + sum(_saved_bytes(facts, unit) for unit in facts.table.all_units)
        yield Held("checkpoint copy", Tier.HOST, size)


def _saved_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Bytes of a unit that one rank writes into a checkpoint: an equal part, whatever it holds."""
    part = unit.layout.padded // facts.topology.group_size("data")
    compute, master = unit.states.compute, unit.states.full
    if not unit.is_trainable:
        return part * compute.itemsize
    return part * (master.itemsize + facts.state_bytes_of(unit) * master.itemsize // 4) + facts.exchange.saved_bytes(
        facts, unit
    )


def _outside_bytes(facts: EstimateInputs) -> int:
    """Bytes of frozen parameters that are in no unit, and of buffers."""
    frozen = [param for param in facts.model.parameters() if facts.table.locate(param) is None]
    compute, total, kept = facts.plan.mixed.model, 0, find_norms(facts.model, facts.plan.mixed)
    for tensor in (*frozen, *facts.model.buffers()):
        is_cast = (
            compute is not None
            and id(tensor) not in kept
            and tensor.is_floating_point()
            and tensor.dtype != torch.float64
        )
        total += tensor.numel() * (compute if is_cast and compute is not None else tensor.dtype).itemsize
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
        span, code = facts.span(unit, unit.states.master), unit.states.codes.master
        masters = span * master.itemsize if has_masters else 0
        if code is not None:
            masters = code.nbytes(span) - (span * code.dtype.itemsize if unit.states.master_is_param else 0)
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
