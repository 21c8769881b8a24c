"""What 1-bit optimizers hold and send beside what others do, for predictions.

Source: the bytes of an exchange are those of `mesh.onebit`; with nodes of several ranks those of `mesh.onebit_nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.engine.coded_report import PHASES
from mpispeed.engine.traffic import Sent, sent_updates
from mpispeed.mesh.onebit import sent_bytes
from mpispeed.mesh.onebit_nodes import shard_length
from mpispeed.optim.exchange import Drifts, Exchange, Exchanges

if TYPE_CHECKING:
    from mpispeed.engine.facts import Facts
    from mpispeed.engine.plan import Plan
    from mpispeed.store.table import Unit

SUBJECTS = {
    Exchange.CODED_GRADIENT: "gradients",
    Exchange.MOMENTUM: "momenta",
    Exchange.DRIFT: "local updates",
}
"""What is coded in a step."""

_ITEM = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class Coding:
    """How an optimizer codes.

    Attributes:
        kinds: what travels in steps that are not in full precision.
        freeze_step: number of the last update that may change the variance.
        hops: axes inside of nodes and between them where a mean inside of nodes comes first, or None.
        own_masters: masters have memory of their own also in fp32.
        local_slots: how many states differ between ranks from one meeting to the next.
    """

    kinds: tuple[Exchange, ...]
    freeze_step: int
    hops: tuple[str, str] | None
    own_masters: bool
    local_slots: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps that send alike: what they are called, which updates they are, and what one rank sends in one of them."""

    name: str
    when: str
    sent: tuple[Sent, ...]

    @property
    def bytes(self) -> int:
        """All that one rank sends in such a step."""
        return sum(row.bytes for row in self.sent)


def coding_of(plan: Plan, rule: Any) -> Coding | None:
    """How `rule` codes under a plan; None if it does not.

    Raises:
        ConfigError: gradients would rest cut or not in fp32, or local updates have no whole masters.
    """
    if not isinstance(rule, Exchanges):
        return None
    name, accumulate = getattr(rule, "name", ""), plan.config.data_types.grad_accum_dtype
    needed = (plan.states.grad, plan.states.master) if isinstance(rule, Drifts) else (plan.states.grad,)
    if not all(placement.is_whole for placement in needed):
        msg = (
            f"optimizer {name} lets gradients stay local after its warm-up, and zero_optimization.stage {plan.stage} "
            "cuts them or what is updated from them over ranks; use stage 0 or 1"
        )
        raise ConfigError(msg)
    if accumulate and plan.policy.accumulate != torch.float32:
        msg = f"optimizer {name} works on gradients in fp32, found data_types.grad_accum_dtype {accumulate}; remove it"
        raise ConfigError(msg)
    if isinstance(rule, Drifts):
        kinds = Exchange.CODED_GRADIENT, Exchange.NOTHING, Exchange.DRIFT
        return Coding(kinds, rule.intervals.var_freeze_step, plan.placing.hops, True, len(rule.local_names))  # type: ignore[attr-defined]
    return Coding((Exchange.MOMENTUM,), rule.freeze_step, plan.placing.hops, False, 0)  # type: ignore[attr-defined]


# -- memory ----------------------------------------------------------------------------------------------------------


def _grid(facts: Facts, coding: Coding) -> tuple[int, int]:
    """Ranks of a node whose mean is coded, and how many workers there are."""
    if coding.hops is None:
        return 1, facts.topology.group_size("data")
    return facts.topology.group_size(coding.hops[0]), facts.topology.group_size(coding.hops[1])


def error_bytes(facts: Facts, unit: Unit) -> int:
    """Errors of the worker and of the server, once the unit was coded."""
    if facts.coding is None:
        return 0
    inner, workers = _grid(facts, facts.coding)
    length = shard_length(unit.layout.padded, inner, workers)
    return _ITEM * (length + length // workers)


def momentum_bytes(facts: Facts, unit: Unit) -> int:
    """The whole momentum beside its cut slot, once it was agreed on."""
    is_kept = facts.coding is not None and Exchange.MOMENTUM in facts.coding.kinds and not facts.master.is_whole
    return _ITEM * unit.layout.padded if is_kept else 0


def saved_bytes(facts: Facts, unit: Unit) -> int:
    """What a rank writes of a unit into a checkpoint besides: its errors, and states that differ between ranks."""
    own = 0 if facts.coding is None else facts.coding.local_slots
    return error_bytes(facts, unit) + own * _ITEM * unit.layout.padded


# -- traffic ---------------------------------------------------------------------------------------------------------


def phases(facts: Facts, full: Sequence[Sent], every: Iterable[Sent]) -> Iterator[Phase]:
    """Kinds of steps with what they send; the first has `full`, the rows of a step in full precision.

    None for optimizers that do not code. `every` is what steps of all kinds send.
    """
    coding = facts.coding
    if coding is None:
        return
    last, always = coding.freeze_step, tuple(every)
    when = {
        Exchange.GRADIENT: f"up to update {last}" + (", ever more rarely" if coding.own_masters else ""),
        Exchange.CODED_GRADIENT: f"the others up to update {last}",
        Exchange.MOMENTUM: f"from update {last + 1}",
        Exchange.NOTHING: f"from update {last + 1}",
        Exchange.DRIFT: f"from update {last + 1}, where ranks meet",
    }
    yield Phase(PHASES[Exchange.GRADIENT], when[Exchange.GRADIENT], tuple(full))
    for kind in coding.kinds:
        rows = [*_exchanged(facts, coding, kind), *sent_updates(facts), *always]
        yield Phase(PHASES[kind], when[kind], tuple(rows))
        if kind is Exchange.MOMENTUM and not facts.master.is_whole:
            rows += _widened(facts)  # kept from then on
            yield Phase(f"first {PHASES[kind]}", f"update {last + 1}, or after loading", tuple(rows))


def _exchanged(facts: Facts, coding: Coding, kind: Exchange) -> Iterator[Sent]:
    """Of all units, one after the other."""
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


def _widened(facts: Facts) -> Iterator[Sent]:
    """Whole momenta of cut ones, and a byte for each element that says where the variance is 0."""
    ranks = facts.topology.group_size(facts.master.axes)
    for unit in facts.table.units:
        for what, size in (("momenta", _ITEM), ("zeros of the variance", 1)):
            yield Sent(what, "all_gather", facts.master.axes, size * unit.layout.padded * (ranks - 1) // ranks)
