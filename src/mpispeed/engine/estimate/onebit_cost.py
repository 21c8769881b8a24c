"""Additional memory and traffic of 1-bit optimizers, for predictions.

Bytes of an exchange as in `mesh.compressed.onebit`; with several ranks per node as in `mesh.compressed.onebit_nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.engine.estimate.traffic import Sent
from mpispeed.mesh.compressed.onebit import sent_bytes
from mpispeed.mesh.compressed.onebit_nodes import shard_length
from mpispeed.optim.exchange import Exchange
from mpispeed.plan.onebit_plan import PHASES, OneBitPlan

if TYPE_CHECKING:
    from mpispeed.engine.estimate.inputs import EstimateInputs
    from mpispeed.store.layout import Unit

SUBJECTS = {
    Exchange.CODED_GRADIENT: "gradients",
    Exchange.MOMENTUM: "momenta",
    Exchange.DRIFT: "local updates",
}
"""The values exchanged in a step, by kind of exchange."""

_ITEM = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps with the same traffic: their name, the updates they are, and the bytes of one rank in one of them."""

    name: str
    when: str
    sent: tuple[Sent, ...]

    @property
    def bytes(self) -> int:
        """Bytes that one rank sends in such a step."""
        return sum(row.bytes for row in self.sent)


# -- memory ----------------------------------------------------------------------------------------------------------


def _grid(facts: EstimateInputs, coding: OneBitPlan) -> tuple[int, int]:
    """Ranks that average before the 1-bit exchange, and workers of the exchange."""
    if coding.hops is None:
        return 1, facts.topology.group_size("data")
    return facts.topology.group_size(coding.hops[0]), facts.topology.group_size(coding.hops[1])


def error_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Bytes of worker and server errors, once the unit was exchanged."""
    if facts.coding is None:
        return 0
    inner, workers = _grid(facts, facts.coding)
    length = shard_length(unit.layout.padded, inner, workers)
    return _ITEM * (length + length // workers)


def momentum_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Bytes of the full momentum that is kept beside its sharded slot from the first exchange on."""
    is_kept = facts.coding is not None and Exchange.MOMENTUM in facts.coding.kinds and not facts.master.is_replicated
    return _ITEM * unit.layout.padded if is_kept else 0


def whole_unit_bytes(facts: EstimateInputs, buffers: int) -> int:
    """Bytes for states in files during a step, where `buffers` serve windows: a 1-bit exchange reads a unit at once."""
    if facts.coding is None:
        return buffers
    longest = max((facts.span(unit, unit.states.master) for unit in facts.table.units), default=0)
    if facts.coding.lends_units:
        return longest * (_ITEM + facts.state_bytes)
    return max(buffers, longest * _ITEM)


def saved_bytes(facts: EstimateInputs, unit: Unit) -> int:
    """Additional bytes of a unit that a rank writes into a checkpoint: errors, and states that differ between ranks."""
    own = 0 if facts.coding is None else facts.coding.local_slots
    return error_bytes(facts, unit) + own * _ITEM * unit.layout.padded


# -- traffic ---------------------------------------------------------------------------------------------------------


def phases(
    facts: EstimateInputs, full: Sequence[Sent], updates: Iterable[Sent], every: Iterable[Sent]
) -> Iterator[Phase]:
    """Kinds of steps with their traffic; the first has `full`, the rows of a step in full precision.

    Empty for other optimizers. `updates` are those of updated parameters, `every` is the traffic common to all kinds of
    steps.
    """
    coding = facts.coding
    if coding is None:
        return
    last, updates, always = coding.freeze_step, tuple(updates), tuple(every)
    when = {
        Exchange.GRADIENT: f"up to update {last}" + (", ever more rarely" if coding.own_masters else ""),
        Exchange.CODED_GRADIENT: f"the others up to update {last}",
        Exchange.MOMENTUM: f"from update {last + 1}",
        Exchange.NOTHING: f"from update {last + 1}",
        Exchange.DRIFT: f"from update {last + 1}, where ranks meet",
    }
    yield Phase(PHASES[Exchange.GRADIENT], when[Exchange.GRADIENT], tuple(full))
    for kind in coding.kinds:
        rows = [*_exchanged(facts, coding, kind), *updates, *always]
        yield Phase(PHASES[kind], when[kind], tuple(rows))
        if kind is Exchange.MOMENTUM and not facts.master.is_replicated:
            rows += _widened(facts)  # kept from then on
            yield Phase(f"first {PHASES[kind]}", f"update {last + 1}, or after loading", tuple(rows))


def _exchanged(facts: EstimateInputs, coding: OneBitPlan, kind: Exchange) -> Iterator[Sent]:
    """Traffic of the exchange of all units."""
    if kind not in SUBJECTS:
        return
    inner, workers = _grid(facts, coding)
    what, (inside, between) = SUBJECTS[kind], coding.hops or ("", "data")
    for unit in facts.table.units:
        length = shard_length(unit.layout.padded, inner, workers)
        if coding.hops is not None:
            for verb in ("reduce_scatter", "all_gather"):
                yield Sent(what, verb, (inside,), _ITEM * length * (inner - 1))
        yield Sent(what, "compressed_all_reduce", (between,), sent_bytes(length, workers))


def _widened(facts: EstimateInputs) -> Iterator[Sent]:
    """Traffic of gathering sharded momenta, and one byte per element that marks zeros of the variance."""
    ranks = facts.topology.group_size(facts.master.axes)
    for unit in facts.table.units:
        for what, size in (("momenta", _ITEM), ("zeros of the variance", 1)):
            yield Sent(what, "all_gather", facts.master.axes, size * unit.layout.padded * (ranks - 1) // ranks)
