"""What a configuration will cost, before anything starts: bytes on each rank, and bytes that each rank sends.

Nothing is measured and nothing is allocated. The units are the engine's own, made of a model on torch's meta device;
placements are counted on a topology; fetching follows the engine's own policy (`engine.rehearsal`).

Source of the placements: Rajbhandari et al., "ZeRO", SC20; of second copies and coded messages: Wang et al., ZeRO++,
arXiv 2306.10209; of cuts over a part of the ranks: Zhang et al., MiCS, arXiv 2205.00119.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.engine.rehearsal import Buffers, Outcome, PaperParams, Rehearsal
from mpispeed.mesh.codec import gather_bytes, reduce_scatter_bytes
from mpispeed.mesh.dtypes import HALF_FLOATS
from mpispeed.mesh.topology import Topology
from mpispeed.native.block_quant import Grid, default_block
from mpispeed.optim.choice import build
from mpispeed.optim.rule import KeepsState, Window
from mpispeed.store.layout import BLOCK
from mpispeed.store.placement import WHOLE, Placement, Tier, moves, reduce_moves
from mpispeed.zero.fetch import Limits
from mpispeed.zero.leaf import is_leaf, mark_leaves_by_threshold
from mpispeed.zero.quantized import Codes
from mpispeed.zero.units import choose_resident, plan_units
from mpispeed.zero.users import find_users

if TYPE_CHECKING:
    from mpispeed.engine.plan import Plan
    from mpispeed.store.table import Table, Unit
    from mpispeed.zero.users import User

ADAM_STATE_BYTES = 8
"""For each element: what is assumed of an optimizer that is given in code."""

NORM_BYTES = 512
"""What each rank adds to the exact sum of squares of all gradients (`zero.norm`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """A kind of model state on one rank."""

    what: str
    tier: Tier
    bytes: int


@dataclass(frozen=True, slots=True)
class Sent:
    """What one rank sends to others in one optimizer step, by the ring formula of the journal."""

    what: str
    verb: str
    axes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The prediction for one rank.

    Attributes:
        held: model states while training; activations are not in it.
        sent: traffic of one optimizer step, once the order of use is known.
        build_bytes: the most that is held while the engine takes the model over.
        lag_bytes: part of the gradient buckets that is held only if sums over ranks lag behind the backward pass.
    """

    held: tuple[Held, ...]
    sent: tuple[Sent, ...]
    build_bytes: int
    lag_bytes: int = 0

    def bytes_of(self, what: str) -> int:
        """Bytes of one kind of state over all tiers."""
        return sum(row.bytes for row in self.held if row.what == what)

    def tier_bytes(self, tier: Tier) -> int:
        """Bytes on one tier."""
        return sum(row.bytes for row in self.held if row.tier == tier)

    def sent_bytes(self, verb: str | None = None) -> int:
        """Bytes sent in one optimizer step by one verb, or by all."""
        return sum(row.bytes for row in self.sent if verb in (None, row.verb))


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a prediction follows from.

    Attributes:
        model: on any device; only shapes and dtypes are read.
        table: its units.
        topology: the ranks.
        param, grad, master: where these rest.
        second: how second copies of parameters are cut; None: there are none.
        compute: dtype that floating parameters are cast to, or None.
        accumulate: dtype of gradients at rest.
        communicate: dtype of gradients that travel; None: the unit's own.
        state_bytes: of the optimizer, for each element.
        micro_steps: forward and backward passes of one optimizer step.
        is_overlapped: gradients are summed while backward runs.
        resident: indices of units that rest whole all the same.
        limits: budgets of fetching.
        codes_params: parameters travel as 8-bit codes.
        codes_frozen: frozen parameters travel and rest as 8-bit codes.
        codes_grads: gradients travel as 4-bit codes.
        scatters: gradients are scattered as they are summed; False: they are summed whole everywhere.
        is_born_cut: the model is built cut already, layer by layer.
    """

    model: nn.Module
    table: Table
    topology: Topology
    param: Placement
    grad: Placement
    master: Placement
    second: Placement | None
    compute: torch.dtype | None
    accumulate: torch.dtype
    communicate: torch.dtype | None
    state_bytes: int
    micro_steps: int
    is_overlapped: bool
    resident: frozenset[int]
    limits: Limits
    codes_params: bool = False
    codes_frozen: bool = False
    codes_grads: bool = False
    scatters: bool = True
    is_born_cut: bool = False

    def dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a unit, as `ParamStore.dtypes`."""
        if unit.dtype == torch.float64 or not unit.dtype.is_floating_point:
            return unit.dtype, unit.dtype
        return unit.dtype if self.compute is None else self.compute, torch.float32

    def grad_dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """In which gradients of a unit rest and travel, as `GradStore` decides."""
        if unit.dtype == torch.float64:
            return unit.dtype, unit.dtype
        return self.accumulate, unit.dtype if self.communicate is None else self.communicate

    def span(self, unit: Unit, placement: Placement) -> int:
        """Elements of a unit's flat buffer that one rank holds."""
        return unit.layout.padded // math.prod(self.topology.group_size(axis) for axis in placement.axes)

    def rest(self, unit: Unit) -> Placement:
        """Where the unit's parameters rest."""
        is_cut = self.topology.group_size(self.param.axes) > 1
        return self.param if is_cut and unit.index not in self.resident else WHOLE

    def is_resident(self, unit: Unit) -> bool:
        """True if the unit's parameters are whole all the time."""
        return self.rest(unit).is_whole


# -- from a plan and a model -----------------------------------------------------------------------------------------


def gather_facts(plan: Plan, model: nn.Module, *, is_born_cut: bool = False) -> Facts:
    """Read off a plan and a model what a prediction needs; all trainable parameters are trained.

    Raises:
        ConfigError: the optimizer is unknown or refuses its settings.
    """
    zero, states = plan.config.zero_optimization, plan.states
    topology = plan.topology()
    group_of = {id(param): 0 for param in model.parameters() if param.requires_grad}
    table = plan_units(
        model,
        group_of,
        topology.group_size("data"),
        plan.bucket_elements,
        merge_elements=zero.param_persistence_threshold,
        takes_frozen=not states.param.is_whole,
    )
    mark_leaves_by_threshold(model, zero.module_granularity_threshold)
    resident = choose_resident(table, zero.param_persistence_threshold, zero.model_persistence_threshold)
    is_cast = plan.config.fp16.enabled or plan.config.bf16.enabled
    is_wire_set = is_cast or plan.config.communication_data_type is not None
    return Facts(
        model=model,
        table=table,
        topology=topology,
        param=_on_tier(states.param, zero.offload_param),
        grad=states.grad,
        master=_on_tier(states.master, zero.offload_optimizer),
        second=states.second,
        compute=plan.policy.compute if is_cast else None,
        accumulate=plan.policy.accumulate if plan.config.data_types.grad_accum_dtype else torch.float32,
        communicate=plan.policy.communicate if is_wire_set else None,
        state_bytes=_state_bytes(plan),
        micro_steps=plan.batch.gradient_accumulation_steps,
        is_overlapped=plan.is_overlapped and topology.group_size("data") > 1,
        resident=frozenset(resident),
        limits=Limits(
            ahead=zero.prefetch_bucket_size if plan.is_overlapped else 0,
            live=zero.max_live_parameters,
            reuse=zero.max_reuse_distance,
        ),
        codes_params=zero.zero_quantized_weights,
        codes_frozen=zero.zero_quantized_nontrainable_weights,
        codes_grads=plan.placing.hops is not None,
        scatters=zero.reduce_scatter,
        is_born_cut=is_born_cut,
    )


def _on_tier(placement: Placement, offload: Any) -> Placement:
    tiers = {"cpu": Tier.HOST, "nvme": Tier.NVME}
    tier = tiers.get(offload.device, placement.tier) if offload is not None else placement.tier
    return Placement(placement.axes, tier)


def _state_bytes(plan: Plan) -> int:
    """Bytes of optimizer state for each fp32 element: the rule's slots, or what one update of a few elements leaves."""
    if plan.optimizer_name is None:
        return ADAM_STATE_BYTES
    rule, defaults = build(plan.optimizer_name, plan.optimizer_params)
    if not isinstance(rule, KeepsState):
        return 4 * len(rule.state_names)
    window = Window(torch.zeros(16), torch.ones(16), {}, {**defaults}, 1, key=(0, 0, 0))
    rule.update([window])
    return sum(slot.element_size() for slot in rule.slots(window.key).values())


# -- prediction ------------------------------------------------------------------------------------------------------


def predict(facts: Facts) -> Budget:
    """Bytes on one rank, and bytes that it sends in one optimizer step."""
    users = find_users(facts.model, facts.table, needs=lambda unit: not facts.is_resident(unit), is_whole=is_leaf)
    outcome = _rehearse(facts, users)
    prompt = _rehearse(replace(facts, is_overlapped=False), users) if facts.is_overlapped else outcome
    held = [*_held_at_rest(facts)]
    device = Tier.DEVICE
    held.append(Held("gathered parameters", device, outcome.gathered_bytes))
    held.append(Held("gradient buckets", device, outcome.scratch_bytes - outcome.gathered_bytes))
    gathers = [Sent("parameters", verb, axes, count) for (verb, axes), count in sorted(outcome.gathers.items())]
    sent = [*_sent_gradients(facts), *gathers, *_sent_updates(facts)]
    ranks = facts.topology.group_size("data")
    if facts.table.units:
        sent.append(Sent("gradient norm", "all_gather", ("data",), NORM_BYTES * (ranks - 1)))
    return Budget(
        held=tuple(row for row in held if row.bytes),
        sent=tuple(row for row in _summed(sent) if row.bytes),
        build_bytes=_build_bytes(facts),
        lag_bytes=outcome.scratch_bytes - prompt.scratch_bytes,
    )


def _held_at_rest(facts: Facts) -> Iterable[Held]:
    units, every = facts.table.units, facts.table.all_units
    rests = sum(_rest_bytes(facts, unit) for unit in every)
    yield Held("parameters", facts.param.tier, rests)
    if facts.second is not None:
        copies = [unit for unit in every if not facts.is_resident(unit)]
        size = sum(facts.span(unit, facts.second) * facts.dtypes(unit)[0].itemsize for unit in copies)
        yield Held("second copies", facts.second.tier, size)
    yield Held("outside of units", Tier.DEVICE, _outside_bytes(facts, is_cast=True))
    masters = states = 0
    for unit in units:
        compute, master = facts.dtypes(unit)
        span = facts.span(unit, facts.master)
        # Masters of the compute dtype are the parameters themselves, unless they rest elsewhere.
        masters += span * master.itemsize if compute != master or facts.master.tier != facts.param.tier else 0
        states += span * facts.state_bytes * master.itemsize // 4
    yield Held("masters", facts.master.tier, masters)
    yield Held("optimizer state", facts.master.tier, states)
    grads = sum(facts.span(unit, facts.grad) * facts.grad_dtypes(unit)[0].itemsize for unit in units)
    yield Held("gradients", facts.grad.tier, grads)


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
        kept = rest + (
            facts.span(unit, facts.master) * master.itemsize if unit.is_trainable and compute != master else 0
        )
        gathered = source if facts.is_born_cut and not facts.is_resident(unit) else 0
        most = max(most, held + source + gathered + kept - (rest if is_source else 0))
        given = sum(sizes[id(param)] for param in unit.params)
        born = facts.span(unit, facts.rest(unit)) * unit.dtype.itemsize
        held += kept - (born if facts.is_born_cut else given)
    return most


# -- traffic ---------------------------------------------------------------------------------------------------------


def _replicas(facts: Facts) -> tuple[str, ...]:
    """Axes along which ranks hold equal parts of masters."""
    cut = facts.topology.resolve(facts.master.axes)
    rest = (axis for axis in facts.topology.resolve("data") if axis not in cut)
    return tuple(axis for axis in rest if facts.topology.group_size(axis) > 1)


def _sums(facts: Facts, unit: Unit) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """(verb, axes, bytes of the whole buffer) of the collectives that sum one micro-step, as `store.move.reduce_into`.

    Sums of 16-bit gradients are in fp32 after the first of several hops.
    """
    size = unit.layout.padded * facts.grad_dtypes(unit)[1].itemsize
    rest = _replicas(facts) if facts.grad.is_whole else ()
    if not facts.scatters:
        axes = facts.topology.resolve("data" if facts.grad.is_whole else facts.master.axes)
        yield "all_reduce", axes, size
        return
    is_half = facts.grad_dtypes(unit)[1] in HALF_FLOATS
    for move in reduce_moves((*facts.master.axes, *rest), facts.master):
        n = facts.topology.group_size(move.axes)
        yield move.verb, move.axes, size
        if n > 1 and move.verb == "reduce_scatter":
            size = size // n * (2 if is_half else 1)
            is_half = False


def _sent_gradients(facts: Facts) -> Iterable[Sent]:
    """Sums inside of the cut run in every micro-step where gradients rest cut; those over replicas once for a step."""
    steps = 1 if facts.grad.is_whole else facts.micro_steps
    replicas = () if facts.grad.is_whole else _replicas(facts)
    for unit in facts.table.units:
        if _is_coded(facts, unit):
            for axis, size in zip(facts.master.axes, _coded_hops(facts, unit), strict=True):
                yield Sent("gradients", "all_to_all", (axis,), steps * size)
        else:
            for verb, axes, size in _sums(facts, unit):
                n = facts.topology.group_size(axes)
                times = 2 if verb == "all_reduce" else 1
                yield Sent("gradients", verb, axes, steps * (times * size * (n - 1) // n))
        n = facts.topology.group_size(replicas)
        part = facts.span(unit, facts.master) * facts.grad_dtypes(unit)[0].itemsize
        yield Sent("gradients", "all_reduce", replicas, 2 * part * (n - 1) // n)


def _is_coded(facts: Facts, unit: Unit) -> bool:
    """As `zero.reducers.QuantizedReducer` decides."""
    is_made_of_vectors = all(len(entry.shape) < 2 for entry in unit.layout.entries)
    return facts.codes_grads and facts.grad_dtypes(unit)[1].itemsize <= 4 and not is_made_of_vectors


def _coded_hops(facts: Facts, unit: Unit) -> tuple[int, int]:
    """Bytes of the two hops of a coded reduction."""
    inner, outer = (facts.topology.group_size(axis) for axis in facts.master.axes)
    return reduce_scatter_bytes(facts.span(unit, facts.master), inner, outer, BLOCK)


def _sent_updates(facts: Facts) -> Iterable[Sent]:
    """From updated masters to where parameters rest."""
    for unit in facts.table.units:
        itemsize = facts.dtypes(unit)[0].itemsize
        for verb, axes, elements in _widening(facts, unit, facts.master, facts.rest(unit)):
            n = facts.topology.group_size(axes)
            yield Sent("updated parameters", verb, axes, elements * itemsize * (n - 1) // n)


def _widening(
    facts: Facts, unit: Unit, source: Placement, target: Placement
) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """(verb, axes, elements of the result) of each collective, as `store.move.widen`."""
    held = facts.span(unit, source)
    for move in moves(Placement(source.axes), Placement(target.axes)):
        held *= facts.topology.group_size(move.axes)
        yield move.verb, move.axes, held


def _gather(facts: Facts, unit: Unit, *, is_second: bool) -> Iterable[tuple[str, tuple[str, ...], int]]:
    """As `zero.collect.Collector`: second copies travel as they are, everything else may be coded."""
    is_second = is_second and facts.second is not None
    source = facts.second if is_second and facts.second is not None else facts.rest(unit)
    steps = list(_widening(facts, unit, source, WHOLE))
    sizes = [facts.topology.group_size(axes) for _, axes, _ in steps]
    count, itemsize = facts.span(unit, source), facts.dtypes(unit)[0].itemsize
    is_coded = facts.codes_params or (facts.codes_frozen and not unit.is_trainable)
    if is_coded and not is_second and Codes.takes(facts.dtypes(unit)[0]):
        sent = gather_bytes(count, sizes, default_block(count))
    else:
        sent = tuple(elements * itemsize * (n - 1) // n for (_, _, elements), n in zip(steps, sizes, strict=True))
    for (verb, axes, _), size in zip(steps, sent, strict=True):
        yield verb, axes, size


def _rest_bytes(facts: Facts, unit: Unit) -> int:
    """Bytes of a unit's parameters at rest."""
    count, dtype = facts.span(unit, facts.rest(unit)), facts.dtypes(unit)[0]
    if facts.codes_frozen and not unit.is_trainable and not facts.is_resident(unit) and Codes.takes(dtype):
        return Grid(count, default_block(count)).nbytes(8)
    return count * dtype.itemsize


def _summed(rows: Iterable[Sent]) -> list[Sent]:
    total: dict[tuple[str, str, tuple[str, ...]], int] = {}
    for row in rows:
        key = row.what, row.verb, row.axes
        total[key] = total.get(key, 0) + row.bytes
    return [Sent(*key, count) for key, count in total.items()]


def _rehearse(facts: Facts, users: list[User]) -> Outcome:
    params = PaperParams(
        facts.table,
        frozenset(unit.index for unit in facts.table.all_units if facts.is_resident(unit)),
        lambda unit: facts.dtypes(unit)[0],
        lambda unit, is_second: _gather(facts, unit, is_second=is_second),
    )

    def bucket(unit: Unit) -> Buffers:
        return [] if facts.grad.is_whole else [(unit.layout.padded, facts.grad_dtypes(unit)[1])]

    def wire(unit: Unit, is_added: bool) -> Buffers:
        rests, travels = facts.grad_dtypes(unit)
        found = [(unit.layout.padded, travels)] if facts.grad.is_whole and rests != travels else []
        if is_added:
            found.append((facts.span(unit, facts.master), torch.promote_types(rests, travels)))
        sizes = [facts.topology.group_size(axis) for axis in facts.master.axes]
        if travels in HALF_FLOATS and facts.scatters and not _is_coded(facts, unit):
            # Sums of 16 bits are kept in fp32 between hops.
            spans = [unit.layout.padded // math.prod(sizes[: i + 1]) for i, n in enumerate(sizes) if n > 1]
            found += [(span, torch.float32) for span in spans[:-1][:1]]
        return found

    rehearsal = Rehearsal(
        facts.model, params, users, facts.limits, bucket=bucket, wire=wire, is_overlapped=facts.is_overlapped
    )
    cuts = any(not facts.is_resident(unit) for unit in facts.table.all_units)
    return rehearsal.run(facts.micro_steps, reduces_each=not facts.grad.is_whole, fetches=cuts)
