"""Traffic of one rank between its own tiers in one optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    from mpispeed.engine.estimate.dry_run import DryParams
    from mpispeed.engine.estimate.inputs import EstimateInputs
    from mpispeed.store.layout import Unit


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank moves between two of its tiers in one optimizer step."""

    what: str
    source: Tier
    target: Tier
    bytes: int


_LADDER = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def moved(facts: EstimateInputs, params: DryParams) -> list[Moved]:
    """Traffic between neighbouring tiers; a move between device and files counts for both of its hops.

    Args:
        facts: inputs of the prediction.
        params: shards and their reads after a dry run.
    """
    total: dict[tuple[str, Tier, Tier], int] = {}

    def move(what: str, source: Tier, target: Tier, count_bytes: int) -> None:
        start, end = _LADDER.index(source), _LADDER.index(target)
        step = 1 if end > start else -1
        for place in range(start, end, step):
            key = what, _LADDER[place], _LADDER[place + step]
            total[key] = total.get(key, 0) + count_bytes

    for unit in facts.table.all_units:
        move("parameters", unit.states.param.tier, Tier.DEVICE, params.reads[unit.index] * params.rest_bytes(unit))
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
    code, (state_bytes, scale_bytes) = unit.states.codes.master, facts.state_sizes(unit, span)
    states = {"optimizer state": state_bytes - scale_bytes}
    if code is not None:
        is_param = unit.states.master_is_param
        states["masters"] = code.nbytes(span) - (span * code.dtype.itemsize if is_param else 0)
    if unit.states.master_is_param:
        move("updated parameters", unit.states.param.tier, runs, span * compute.itemsize)
    elif code is None:
        states["masters"] = span * master.itemsize
    move("updated parameters", runs, unit.states.param.tier, span * compute.itemsize)
    for what, size in states.items():
        rests = facts.state_tier(unit) if what == "optimizer state" else unit.states.master.tier
        move(what, rests, runs, size)
        move(what, runs, rests, size)


def _move_gradients(facts: EstimateInputs, unit: Unit, move: Move) -> None:
    """Reduced gradients to their tier in every micro-step, and from there to the optimizer."""
    rests, runs = unit.states.grad.tier, update_tier(unit)
    size = facts.span(unit, unit.states.master) * unit.states.accumulate.itemsize
    times = 0 if unit.states.grad.is_replicated else facts.micro_steps
    move("gradients", Tier.DEVICE, rests, times * size)
    if rests == Tier.NVME:
        move("gradients", rests, Tier.HOST, max(times - 1, 0) * size)  # read back to be added to
    move("gradients", rests, runs, size)
