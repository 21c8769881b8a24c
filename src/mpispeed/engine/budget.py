"""What a configuration will cost, before anything starts: bytes on each rank, and bytes that each rank sends.

Nothing is measured and nothing is allocated. The units are the engine's own, made of a model on torch's meta device;
placements are counted on a topology; fetching follows the engine's own policy (`engine.rehearsal`).

Source of the placements: Rajbhandari et al., "ZeRO", SC20; of second copies and coded messages: Wang et al., ZeRO++,
arXiv 2306.10209; of cuts over a part of the ranks: Zhang et al., MiCS, arXiv 2205.00119.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.engine.coding import Phase, error_bytes, momentum_bytes, phases, saved_bytes
from mpispeed.engine.facts import Facts, gather_facts
from mpispeed.engine.rehearsal import Buffers, Outcome, PaperParams, Rehearsal
from mpispeed.engine.traffic import (
    Moved,
    Sent,
    gather,
    is_coded_sum,
    moved,
    rest_bytes,
    sent_gradients,
    sent_updates,
)
from mpispeed.mesh.dtypes import HALF_FLOATS
from mpispeed.store.placement import Tier
from mpispeed.store.tiers import GRAD, MASTER, PARAM
from mpispeed.zero.accumulators import WRITES_BEHIND
from mpispeed.zero.fetch import Limits
from mpispeed.zero.leaf import is_leaf
from mpispeed.zero.users import find_users

if TYPE_CHECKING:
    from mpispeed.store.table import Unit
    from mpispeed.zero.users import User

__all__ = ["Budget", "Facts", "Held", "Moved", "Phase", "Sent", "gather_facts", "predict"]

ORDER = (
    "parameters", "second copies", "outside of units", "masters", "optimizer state", "gradients", "1-bit momentum",
    "1-bit errors",
)  # fmt: skip
"""Of what is held at rest."""

NORM_BYTES = 512
"""What each rank adds to the exact sum of squares of all gradients (`zero.norm`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A kind of model state on one rank."""

    what: str
    tier: Tier
    bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The prediction for one rank.

    Attributes:
        held: model states while training; activations are not in it.
        sent: traffic of one optimizer step, once the order of use is known; of 1-bit optimizers one in full precision.
        build_bytes: the most that is held while the engine takes the model over.
        lag_bytes: part of the gradient buckets that is held only if sums over ranks lag behind the backward pass.
        moved: traffic between tiers in one optimizer step.
        file_bytes: swap files, of whole pages; the kinds of state in them are in `held` as they are.
        phases: of 1-bit optimizers, kinds of steps that send different things; that of `sent` is the first.
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


def predict(facts: Facts) -> Budget:
    """Bytes on one rank, and bytes that it sends in one optimizer step.

    Raises:
        ConfigError: a part of a unit is longer than the buffers between files and memory.
    """
    users = find_users(facts.model, facts.table, needs=lambda unit: not facts.is_resident(unit), is_whole=is_leaf)
    played = facts
    if facts.gathers_once:  # each unit is fetched once and stays
        played = replace(facts, micro_steps=1, limits=Limits(ahead=0, live=1 << 60, reuse=1 << 60))
    outcome = _rehearse(played, users)
    prompt = _rehearse(replace(played, is_overlapped=False), users) if facts.is_overlapped else outcome
    held = [*_held_at_rest(facts), *_buffers(facts)]
    device = Tier.DEVICE
    held.append(Held("gathered parameters", device, max(outcome.gathered_bytes, _held_bytes(facts))))
    held.append(Held("gradient buckets", device, outcome.scratch_bytes - outcome.gathered_bytes))
    gathers = [Sent("parameters", verb, axes, count) for (verb, axes), count in sorted(outcome.gathers.items())]
    norm = list(_sent_norm(facts))
    sent = _summed([*sent_gradients(facts), *gathers, *sent_updates(facts), *norm])
    return Budget(
        held=tuple(row for row in held if row.bytes),
        sent=sent,
        build_bytes=_build_bytes(facts),
        lag_bytes=outcome.scratch_bytes - prompt.scratch_bytes,
        moved=tuple(moved(facts, _fetches(facts, outcome))),
        file_bytes=sum(facts.swap.file_bytes.values()),
        phases=tuple(replace(phase, sent=_summed(phase.sent)) for phase in phases(facts, sent, [*gathers, *norm])),
    )


def _sent_norm(facts: Facts) -> Iterable[Sent]:
    ranks = facts.topology.size
    if facts.table.units:
        axes = ("data",) if ranks == facts.topology.group_size("data") else facts.topology.names
        yield Sent("gradient norm", "all_gather", axes, NORM_BYTES * (ranks - 1))


def _held_bytes(facts: Facts) -> int:
    """Parameters that are gathered at once for the time of a step."""
    if not facts.gathers_once:
        return 0
    cut = [unit for unit in facts.table.all_units if not facts.is_resident(unit)]
    return sum(unit.layout.padded * facts.dtypes(unit)[0].itemsize for unit in cut)


def _fetches(facts: Facts, outcome: Outcome) -> Mapping[int, int]:
    """How often what rests here is read for a gather; second copies are read instead while they are fresh."""
    found: dict[int, int] = {}
    for (index, is_fresh), count in outcome.fetches.items():
        if not (is_fresh and facts.second is not None):
            found[index] = found.get(index, 0) + count
    return found


def _held_at_rest(facts: Facts) -> Iterable[Held]:
    total: dict[tuple[str, Tier], int] = {}

    def add(what: str, tier: Tier, count_bytes: int) -> None:
        total[what, tier] = total.get((what, tier), 0) + count_bytes

    for unit in facts.table.all_units:
        add("parameters", facts.param_tier(unit), rest_bytes(facts, unit))
        if facts.second is not None and not facts.is_resident(unit):
            size = facts.span(unit, facts.second) * facts.dtypes(unit)[0].itemsize
            add("second copies", facts.second.tier, size)
    add("outside of units", Tier.DEVICE, _outside_bytes(facts, is_cast=True))
    for unit in facts.table.units:
        master, span = facts.dtypes(unit)[1], facts.span(unit, facts.master)
        add("masters", facts.state_tier(unit), 0 if facts.is_shared(unit) else span * master.itemsize)
        add("optimizer state", facts.state_tier(unit), span * facts.state_bytes * master.itemsize // 4)
        add("gradients", facts.grad_tier(unit), facts.span(unit, facts.grad) * facts.grad_dtypes(unit)[0].itemsize)
        add("1-bit momentum", Tier.HOST, momentum_bytes(facts, unit))
        add("1-bit errors", Tier.HOST, error_bytes(facts, unit))
    for what in ORDER:
        for tier in Tier:
            yield Held(what, tier, total.get((what, tier), 0))


def _buffers(facts: Facts) -> Iterable[Held]:
    """Between files and memory, all of them in use."""
    swap = facts.swap
    yield Held("parameter buffers", Tier.HOST, swap.param_buffers * swap.param_bytes)
    if swap.window_kinds:
        widest = max(dtype.itemsize for _, dtype in swap.cells.values())
        count = len(swap.window_kinds) * swap.in_flight
        yield Held("update buffers", Tier.HOST, count * swap.window_elements * widest)
    # States in swap files cannot be copied: such checkpoints are waited for.
    if facts.copies_checkpoint and not swap.file_bytes:
        yield Held("checkpoint copy", Tier.HOST, sum(_saved_bytes(facts, unit) for unit in facts.table.all_units))


def _saved_bytes(facts: Facts, unit: Unit) -> int:
    """What a rank writes of a unit into a checkpoint: an equal part, whatever it holds."""
    part = unit.layout.padded // facts.topology.group_size("data")
    compute, master = facts.dtypes(unit)
    if not unit.is_trainable:
        return part * compute.itemsize
    return part * (master.itemsize + facts.state_bytes * master.itemsize // 4) + saved_bytes(facts, unit)


def _outside_bytes(facts: Facts, *, is_cast: bool) -> int:
    """Frozen parameters that are in no unit, and buffers."""
    frozen = [param for param in facts.model.parameters() if facts.table.locate(param) is None]
    total = 0
    for tensor in (*frozen, *facts.model.buffers()):
        changes = is_cast and facts.compute is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        dtype = facts.compute if changes and facts.compute is not None else tensor.dtype
        total += tensor.numel() * dtype.itemsize
    return total


def _build_bytes(facts: Facts) -> int:
    """The most that is held while units are taken over from the model, one after the other."""
    sizes = {id(param): math.prod(param.shape) * param.dtype.itemsize for param in facts.model.parameters()}
    held = sum(sizes.values()) + sum(buffer.nbytes for buffer in facts.model.buffers())
    if facts.is_born_cut:
        held -= sum(sizes[id(param)] for unit in facts.table.all_units for param in unit.params)
        held += sum(facts.span(unit, facts.rest(unit)) * unit.dtype.itemsize for unit in facts.table.all_units)
    most = held
    for unit in facts.table.all_units:
        compute, master = facts.dtypes(unit)
        source = unit.layout.padded * unit.dtype.itemsize
        rest = facts.span(unit, facts.rest(unit)) * compute.itemsize
        is_source = facts.is_resident(unit) and compute == unit.dtype
        has_masters = unit.is_trainable and not facts.is_shared(unit)
        masters = facts.span(unit, facts.master) * master.itemsize if has_masters else 0
        made = rest + masters
        gathered = source if facts.is_born_cut and not facts.is_resident(unit) else 0
        most = max(most, held + source + gathered + made - (rest if is_source else 0))
        given = sum(sizes[id(param)] for param in unit.params)
        born = facts.span(unit, facts.rest(unit)) * unit.dtype.itemsize
        written = sum(size for kind, size in ((PARAM, rest), (MASTER, masters)) if (kind, unit.index) in facts.cells)
        held += made - written - (born if facts.is_born_cut else given)
    return most


def _summed(rows: Iterable[Sent]) -> tuple[Sent, ...]:
    """A row for each kind of message; without those that send nothing."""
    total: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for row in rows:
        key = row.what, row.verb, row.axes
        total[key] = total.get(key, 0) + row.bytes
    return tuple(Sent(*key, count) for key, count in total.items() if count)


def _rehearse(facts: Facts, users: list[User]) -> Outcome:
    params = PaperParams(
        facts.table,
        frozenset(unit.index for unit in facts.table.all_units if facts.is_resident(unit)),
        lambda unit: facts.dtypes(unit)[0],
        lambda unit, is_second: gather(facts, unit, is_second=is_second),
    )

    def bucket(unit: Unit) -> Buffers:
        return [] if facts.grad.is_whole else [(unit.layout.padded, facts.grad_dtypes(unit)[1])]

    def wire(unit: Unit, is_added: bool) -> Buffers:
        rests, travels = facts.grad_dtypes(unit)
        found = [(unit.layout.padded, travels)] if facts.grad.is_whole and rests != travels else []
        if is_added:
            found.append((facts.span(unit, facts.master), torch.promote_types(rests, travels)))
        sizes = [facts.topology.group_size(axis) for axis in facts.master.axes]
        if travels in HALF_FLOATS and facts.scatters and not is_coded_sum(facts, unit):
            # Sums of 16 bits are kept in fp32 between hops.
            spans = [unit.layout.padded // math.prod(sizes[: i + 1]) for i, n in enumerate(sizes) if n > 1]
            found += [(span, torch.float32) for span in spans[:-1][:1]]
        return found

    longest: dict[torch.dtype, int] = {}
    for (kind, _), (numel, dtype) in facts.cells.items():
        if kind == GRAD:
            longest[dtype] = max(numel, longest.get(dtype, 0))

    def swapped(unit: Unit) -> Buffers:
        dtype = facts.grad_dtypes(unit)[0]
        return [(longest[dtype], dtype)] if (GRAD, unit.index) in facts.cells else []

    rehearsal = Rehearsal(
        facts.model, params, users, facts.limits, bucket=bucket, wire=wire, swapped=swapped,
        writes_behind=WRITES_BEHIND if facts.swap.writes_behind else 0, is_overlapped=facts.is_overlapped,
    )  # fmt: skip
    cuts = any(not facts.is_resident(unit) for unit in facts.table.all_units)
    return rehearsal.run(facts.micro_steps, reduces_each=not facts.grad.is_whole, fetches=cuts)
