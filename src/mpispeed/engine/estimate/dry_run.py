"""Dry run of optimizer steps: the parts of a run on torch's meta device, over a mesh on which nothing moves.

Modules are taken in the order of their registration, backward in reverse; a model that runs them in another order,
several times or not at all differs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.engine.estimate.owners import MatrixRounds
from mpispeed.engine.plan_parts import choose_reducer, make_shards, make_sums
from mpispeed.engine.replica_groups import Sharing
from mpispeed.mesh.dry import DryWorld
from mpispeed.mesh.mesh import Mesh
from mpispeed.native import exact_sum
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.grad_shards import sum_limbs
from mpispeed.sharding.grads import GradStore
from mpispeed.sharding.leaf import is_leaf
from mpispeed.sharding.module_units import find_module_units, needed_elements
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.prefetch import Prefetcher
from mpispeed.sharding.quantized import QuantizedReducer
from mpispeed.sharding.reducers import Listener, PlainReducer, SumChannel
from mpispeed.sharding.slot_sums import SlotSums
from mpispeed.sharding.sparse import RowReducer
from mpispeed.store.arena import Arena
from mpispeed.store.dry import META, DryTiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpispeed.engine.estimate.inputs import EstimateInputs
    from mpispeed.mesh.collectives.group import Record
    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.compressed.quantized import Feedback
    from mpispeed.sharding.module_units import ModuleUnits
    from mpispeed.store.layout import Place, Table, Unit

MICRO_STEPS = 3
"""Micro-steps of a step that are run; of more, the last but one counts several times, because those are alike."""

_SAVES_NO_WEIGHT = (nn.Embedding, nn.EmbeddingBag)
"""Their backward pass needs the indices only."""

_OF_CHANNEL = {"params": "parameters", "grads": "gradients"}
"""What started operations send, by channel."""

Key = tuple[str, str, tuple[str, ...]]
"""What is sent, the verb, the axes."""


class DryParams(ParamShards):
    """Shards of parameters on meta; the model's own parameters stay as they are.

    Attributes:
        reads: reads of this rank's shards for gathers, by unit; each counts `weight` times.
    """

    reads: Counter[int]
    weight = 1

    def adopt_all(self) -> None:
        """Take over all units."""
        self.reads = Counter()
        for unit in self.table.all_units:
            self.adopt(unit, torch.empty(unit.layout.padded, dtype=unit.dtype, device=META))

    def rest_bytes(self, unit: Unit) -> int:
        """Bytes of this rank's shard, wherever it is kept."""
        stored, codes = self.stored_shard(unit), self.gatherer.codes.get(unit.index)
        return stored.memory_bytes + stored.file_bytes + (0 if codes is None else codes.nbytes)

    def unshard(self, unit: Unit, full: torch.Tensor) -> None:
        """Do nothing."""

    def reshard(self, unit: Unit) -> None:
        """Do nothing."""

    def start_gather(self, channel: Mesh, unit: Unit, full: torch.Tensor, reader: Callable[[], str]) -> Work:
        """As `ParamShards.start_gather`; notes reads of this rank's shard."""
        if self.gatherer.copy_of(unit) is None:
            self.reads[unit.index] += self.weight
        return super().start_gather(channel, unit, full, reader)


@dataclass(slots=True)
class Outcome:
    """Bytes that one rank holds, and sends in a step.

    Attributes:
        params: parameters and masters at rest; its `reads` are those of the last step.
        grads: gradients.
        error_bytes: of quantized sums.
        error_elements: of quantized sums.
        matrices: updates of matrices as wholes.
        sent: bytes sent in the last step.
        messages: calls of verbs in the last step, by the same keys.
        gathered_bytes: most bytes of full units.
        scratch_bytes: bytes of full units and of buckets.
        slot_bytes: those of them that sums of slots take, which wait for others of an update.
    """

    params: DryParams
    grads: GradStore
    matrices: MatrixRounds
    sent: Counter[Key]
    messages: Counter[Key]
    gathered_bytes: int = 0
    scratch_bytes: int = 0
    slot_bytes: int = 0
    error_bytes: int = 0
    error_elements: int = 0


def rehearse(facts: EstimateInputs) -> Outcome:
    """Run two optimizer steps of one rank: the order of use is recorded in the first. Local."""
    return _DryRun(facts).run()


class _Repeats:
    """Bytes sent and calls of verbs, by purpose, verb and axes.

    What one unit sends is repeated for others of its kind.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.sent: Counter[Key] = Counter()
        self.messages: Counter[Key] = Counter()
        self.what, self.weight, self._world = "", 1, mesh.world
        self._known: dict[object, list[tuple[Key, int]]] = {}
        self._noted: list[tuple[Key, int]] | None = None  # while a unit's messages are noted
        mesh.comm_trace.subscribe(self._read)

    def _read(self, record: Record) -> None:
        channel = self._world.running if isinstance(self._world, DryWorld) else ""
        key = _OF_CHANNEL.get(channel, self.what), record.verb, record.axes
        self._count(key, record.sent_bytes)
        if self._noted is not None:
            self._noted.append((key, record.sent_bytes))

    def _count(self, key: Key, size: int) -> None:
        self.sent[key] += size * self.weight
        self.messages[key] += self.weight

    def once(self, kind: object, run: Callable[[], object]) -> None:
        """Run `run` for the first of its kind, and count the same again for the others."""
        rows = self._known.get(kind)
        if rows is None:
            noted = self._noted = []
            run()
            self._known[kind], self._noted = noted, None
            return
        for row in rows:
            self._count(*row)


class _QuantizedOnce(Listener):
    """A `QuantizedReducer` that works on one unit of each kind: it looks at the message of every rank."""

    def __init__(self, reducer: QuantizedReducer, repeats: _Repeats) -> None:
        self._reducer, self._repeats = reducer, repeats
        self._first: dict[object, Unit] = {}
        self._units: dict[int, Unit] = {}  # by index; the first of the kind of each

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`."""
        if not self._reducer.takes(unit, wire.dtype):
            self._reducer(mesh, unit, wire, target, scale, arena)
            return
        kind = unit.layout.padded, unit.states
        first = self._units[unit.index] = self._first.setdefault(kind, unit)
        self._repeats.once(("sum", *kind), lambda: self._reducer(mesh, first, wire, target, scale, arena))

    def errors(self) -> Iterator[Feedback]:
        """Error feedback of each unit, or that of another of its kind."""
        found = map(self._reducer.feedback_of, self._units.values())
        return (feedback for feedback in found if feedback is not None)


class _DryRun:
    def __init__(self, facts: EstimateInputs) -> None:
        self._facts, model, table = facts, facts.model, facts.table
        mesh = self._mesh = facts.dry_mesh()
        self._repeats = _Repeats(mesh)
        params = make_shards(DryParams, facts.plan, mesh, table, DryTiers(facts.swap))
        if facts.plan.device.type != "cpu":  # buffers of a device are kept
            params.arena = Arena(META, returns=False)
        params.adopt_all()
        self._users = find_module_units(
            model, table, needs=lambda unit: not unit.states.param.is_replicated, is_whole=is_leaf
        )
        self._fetcher: Prefetcher | None = None
        if table.shards_params:
            limits = facts.plan.fetch_limits.by_need(needed_elements(self._users))
            self._fetcher = Prefetcher(params, mesh.channel("params"), params.arena, limits, wait=_wait)
        reducer = choose_reducer(facts.plan, model, table)
        if isinstance(reducer, RowReducer):  # rows depend on the data; whole tables are counted
            reducer = PlainReducer()
        elif isinstance(reducer, QuantizedReducer):
            reducer = _QuantizedOnce(reducer, self._repeats)
        self._reducer = reducer
        shards, sums, channel = make_sums(facts.plan, params, reducer, _wait)
        if not facts.is_overlapped:
            channel = SumChannel(channel.mesh, _wait, channel.is_started, is_overlapped=False)
        store, matrices = GradStore(shards, sums, channel), MatrixRounds(facts, mesh, params)
        self._out = Outcome(params, store, matrices, self._repeats.sent, self._repeats.messages)
        self._sharing = _sharing(mesh, model)
        self._uses = list(_backward_uses(model, table))
        self._cut = [unit for unit in table.all_units if not unit.states.param.is_replicated]
        self._gradients = {
            entry.name: torch.empty(entry.shape, dtype=unit.states.compute, device=META)
            for unit in table.units
            for entry in unit.layout.entries
        }

    def run(self) -> Outcome:
        """Run the steps."""
        out, total = self._out, self._facts.micro_steps
        with torch.no_grad():
            self._step(1)
            out.sent.clear()
            out.messages.clear()
            out.params.reads.clear()
            self._step(total)
        out.gathered_bytes = 0 if self._fetcher is None else self._fetcher.tally.peak_bytes
        out.scratch_bytes = out.params.arena.peak_bytes
        if isinstance(out.grads.exchange, SlotSums):
            out.slot_bytes = out.grads.exchange.peak_bytes
        for feedback in self._reducer.errors() if isinstance(self._reducer, _QuantizedOnce) else ():
            out.error_bytes += feedback.nbytes
            out.error_elements += feedback.elements
        return out

    # -- one step ----------------------------------------------------------------------------------------------------

    def _step(self, total: int) -> None:
        params, grads = self._out.params, self._out.grads
        once = self._fetcher if self._facts.plan.gathers_once else None
        if once is not None:
            once.open(self._cut)
        # Sums by slots differ from one micro-step to the next, in what they send and in what they keep.
        count = total if self._facts.plan.slots is not None else min(total, MICRO_STEPS)
        for micro in range(count):
            self._repeats.weight = params.weight = total - count + 1 if micro == count - 2 else 1
            self._micro_step(None if once is not None else self._fetcher, is_last=micro == count - 1)
        self._repeats.weight = params.weight = 1
        grads.finish()
        if once is not None:
            once.close(self._cut)
        self._update()
        grads.clear()

    def _micro_step(self, fetcher: Prefetcher | None, *, is_last: bool) -> None:
        if fetcher is not None:
            self._forward(fetcher)
        self._out.grads.begin_backward(reduces=is_last)
        self._backward(fetcher)
        self._out.grads.end_backward()

    def _update(self) -> None:
        """Communication of the parts of a step, in their order (`engine.build.assemble.step_parts`)."""
        params, grads, model, repeats = self._out.params, self._out.grads, self._facts.model, self._repeats
        if isinstance(model, PipelineModule) and model.stage_id == model.num_stages - 1:
            repeats.what = "losses"
            self._mesh["data"].all_reduce(torch.empty(1, dtype=torch.float64, device=META), "avg")
        if not params.table.units and not isinstance(model, PipelineModule):  # a stage may have nothing to add
            return
        repeats.what = "gradients of shared weights"
        self._sharing.sum(grads)
        repeats.what = "gradient norm"
        sum_limbs(self._mesh, exact_sum.limbs_of(()))
        slots = self._facts.plan.slots
        if slots is not None and not isinstance(model, PipelineModule):  # see `engine.slot_losses.SlotLosses`
            repeats.what = "losses of micro-batches"
            comm, count = self._mesh[self._mesh.topology.names], slots.per_rank + 1
            losses = torch.empty(comm.size * count, dtype=torch.float64, device=META)
            comm.all_gather(losses, losses[:count])
        repeats.what = "matrices to owners and back"
        self._out.matrices.run()
        repeats.what = "updated parameters"
        if self._fetcher is not None:
            self._fetcher.reshard_all()
        for unit in params.table.units:
            params.gatherer.forget(unit)
            repeats.once((unit.layout.padded, unit.states), partial(params.publish, unit))

    # -- passes ------------------------------------------------------------------------------------------------------

    def _forward(self, fetcher: Prefetcher) -> None:
        fetcher.begin_pass(True)
        running: list[ModuleUnits] = []
        for user in self._users:
            while running and running[-1].name and not user.name.startswith(f"{running[-1].name}."):
                fetcher.unhold(running.pop().units, reshards=True)
            if user.units:
                fetcher.unshard(user.units, is_backward=False, reader=_a_module)
                fetcher.hold(user.units)
            running.append(user)
        for user in reversed(running):
            fetcher.unhold(user.units, reshards=True)

    def _backward(self, fetcher: Prefetcher | None) -> None:
        grads = self._out.grads
        for units, landed in self._uses:
            if fetcher is not None and units:
                fetcher.unshard(units, is_backward=True, reader=_a_module)
            for place in landed:
                grads.land(place.unit, place.entry, self._gradients[place.entry.name])
                if fetcher is not None and grads.has_landed(place.unit):
                    fetcher.reshard_unused((place.unit.index,))
        if fetcher is not None:
            fetcher.reshard_idle()


def _backward_uses(model: nn.Module, table: Table) -> Iterator[tuple[tuple[Unit, ...], list[Place]]]:
    """Units that modules need in backward, in turn, and the parameters whose gradients are complete then."""
    modules = [(module, own) for module in model.modules() if (own := list(module.parameters(recurse=False)))]
    left = Counter(id(param) for _, params in modules for param in params)
    for module, params in reversed(modules):
        places = [place for param in params if (place := table.locate(param)) is not None]
        units = {place.unit.index: place.unit for place in places if not place.unit.states.param.is_replicated}
        landed = []
        for param in params:
            left[id(param)] -= 1
            place = table.find(param)
            if place is not None and not left[id(param)]:
                landed.append(place)
        yield () if isinstance(module, _SAVES_NO_WEIGHT) else tuple(units.values()), landed


def _a_module() -> str:
    return "a module"


def _wait(work: Work, what: Callable[[], str]) -> None:
    del what
    work.wait()


def _sharing(mesh: Mesh, model: nn.Module) -> Sharing:
    """As `Sharing.of`, but over `mesh`: groups of the model itself may be those of a run."""
    ties: dict[str, Comm] = {}
    pipe = mesh["pipe"]
    for tied in map(model.tied, model.tied_keys()) if isinstance(model, PipelineModule) else ():
        if pipe.rank in tied.stages and len(tied.stages) > 1:
            members = [pipe.ranks[place] for place in tied.stages]
            is_all = len(members) == pipe.size
            ties[tied.key] = pipe if is_all else pipe.split(1, members, (f"tied {tied.key}",))
    return Sharing(mesh["model"], ties)
