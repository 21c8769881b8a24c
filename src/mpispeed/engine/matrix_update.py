"""Updates of matrices as wholes (Muon's), where ranks hold parts of them: parts to the owners, results back.

States stay in equal flat shards, whatever matrices are in them. The matrices of a round are under way together: their
parts travel while the owners still work on those of the round before, and results while they work on the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import AgreementError, MpispeedError, StoreError
from mpispeed.engine.matrices import Group, Round, counts_of, find_groups
from mpispeed.engine.step import StepContext, Update
from mpispeed.mesh.comm import Failures
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.matrices import Member
    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Matrixwise, Window
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import UpdateWindows
    from mpispeed.store.layout import Unit

Works = Sequence[Callable[[], None]]


class MatrixUpdate(Update):
    """Update in rounds of matrices, after all other parameters.

    Each round: states of this rank's parts, parts to the owners, their work, results back, masters of the parts. Rounds
    overlap: results of one are awaited when the owners have worked on the next.

    A rank where something fails goes on with its messages, and all ranks hear of it at the end of the update.
    """

    agrees_itself = True

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        model: nn.Module,
        rule: Matrixwise,
        update_windows: UpdateWindows,
        groups: list[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
        params: ParamStore,
    ) -> None:
        """Find the owners.

        Collective over: all ranks.
        """
        super().__init__(mesh, rule, update_windows, groups, optimizer)  # type: ignore[arg-type] # it is a rule besides
        self._matrixwise, self._device = rule, plan.device
        units = params.table.units
        is_matrix = {unit.index: _is_for(rule, groups, unit) for unit in units}
        self._others = tuple(unit for unit in units if not is_matrix[unit.index])
        chosen = [unit for unit in units if is_matrix[unit.index]]
        dtypes = {
            unit.index: rule.dtype_of(groups[unit.layout.entries[0].group], unit.states.full, plan.device)
            for unit in chosen
        }
        self.found = find_groups(mesh, model, params, chosen, dtypes)
        self._rounds = [(group, each) for group in self.found for each in group.rounds]

    def works(self, ctx: StepContext) -> Works:
        """The parameters that are no matrices and the rounds; then all ranks agree that none has failed."""
        failures = Failures()
        return partial(self._run, ctx, failures), partial(self._agree, failures)

    def _run(self, ctx: StepContext, failures: Failures) -> None:
        """Collective over: the groups of matrices."""
        trips = [RoundTrip(self._matrixwise, self._groups, group, each, self._device) for group, each in self._rounds]
        with failures.kept():
            self._update_others(ctx)
        for at in range(len(trips) + 2):
            if at < len(trips):
                self._begin(trips[at], ctx, failures)
            if 0 <= at - 1 < len(trips):
                trips[at - 1].work(failures)
            if at >= 2:
                self._end(trips[at - 2], ctx, failures)

    def _agree(self, failures: Failures) -> None:
        """Raise the first failure of a rank on all ranks. Collective over: all ranks."""
        kind = StoreError if self._update_windows.is_swapping else AgreementError
        with self._mesh[self._mesh.topology.names].together(kind, plain=(MpispeedError, OSError)):
            failures.raise_first()

    def _update_others(self, ctx: StepContext) -> None:
        with closing(self._update_windows.windows_of(self._others, self._groups, ctx.step)) as windows:
            self._matrixwise.update_others(windows, grad_scale=ctx.multiplier, threads=ctx.threads)

    def _begin(self, trip: RoundTrip, ctx: StepContext, failures: Failures) -> None:
        """States of this rank's parts; their directions begin to travel."""
        trip.open()
        with (
            failures.kept(),
            closing(
                self._update_windows.windows_of(trip.round.units, self._groups, ctx.step, has_out=False)
            ) as windows,
        ):
            for window in windows:
                trip.collect(window, self._matrixwise.direction(window, grad_scale=ctx.multiplier))
        trip.send()

    def _end(self, trip: RoundTrip, ctx: StepContext, failures: Failures) -> None:
        """Masters of this rank's parts, when the results are there; none after a failure of this rank."""
        trip.receive()
        if failures.first is None:
            with (
                failures.kept(),
                closing(self._update_windows.windows_of(trip.round.units, self._groups, ctx.step)) as windows,
            ):
                for window in windows:
                    trip.apply(window)
        trip.drop()


@dataclass(eq=False)
class RoundTrip:
    """One round on its way.

    Attributes:
        rule: directions, their orthogonal factors and what becomes of them.
        groups: hyper-parameters.
        group: the ranks.
        round: the matrices.
        device: where matrices are made orthogonal.
    """

    rule: Matrixwise
    groups: Sequence[Mapping[str, Any]]
    group: Group
    round: Round
    device: torch.device
    _sent: dict[int, tuple[Span, torch.Tensor]] = field(default_factory=dict)
    _parts: torch.Tensor = field(init=False)
    _gathered: torch.Tensor = field(init=False)
    _results: list[torch.Tensor] = field(default_factory=list)
    _under_way: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        indices, size = self.round.matrices, len(self.group.members)
        self._outgoing, self._incoming = [*self.group.outgoing(indices)], [*self.group.incoming(indices)]
        self._out_counts, self._in_counts = counts_of(self._outgoing, size), counts_of(self._incoming, size)

    @property
    def message_bytes(self) -> int:
        """Bytes of its messages, while it is under way."""
        numel = sum(self._out_counts) + (sum(self._in_counts) if self.group.gathers else 0)
        if not self.group.axes:
            numel += sum(self.group.matrices[at].numel for at in self.round.matrices)
        return numel * self.group.dtype.itemsize

    @property
    def work_bytes(self) -> int:
        """Bytes that this rank needs while it works on its matrices: one whole at a time, and what the iteration keeps.

        That is a matrix three times (as it came, before and after a step) and three products with itself.
        """
        most = 0
        for at in self.group.owned(self.round.matrices, self.group.me):
            count, rows, columns = self.group.matrices[at].shape
            most = max(most, count * (4 * rows * columns + 3 * min(rows, columns) ** 2))
        return most * self.group.dtype.itemsize

    # -- parts to owners ---------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make room for this rank's parts. Local."""
        self._parts = self._room(sum(self._out_counts))
        start = 0
        for _, at, span in self._outgoing:
            self._sent[at] = span, self._parts[start : start + span.numel]
            start += span.numel

    def collect(self, window: Window, direction: torch.Tensor) -> None:
        """Keep a window's part of directions for the message."""
        for at, span, common in self._overlaps(window):
            if at in self._sent:
                part, values = self._sent[at]
                own = common.shifted(-span.start).intersect(part)
                source = direction[own.shifted(span.start - window.key[2]).slice]
                values[own.shifted(-part.start).slice].copy_(source)

    def send(self) -> None:
        """Start the message to the owners. Collective over: the group."""
        if not self.group.gathers:
            self._gathered = self._parts
            return
        self._gathered = self._room(sum(self._in_counts))
        self._under_way.append(
            self.group.comm.start_all_to_all(self._gathered, self._parts, self._in_counts, self._out_counts)
        )

    # -- owners ------------------------------------------------------------------------------------------------------

    def work(self, failures: Failures) -> None:
        """Wait for the parts, make this rank's matrices orthogonal one by one, and start the messages back.

        Args: `failures` keeps what goes wrong with the matrices; the messages go on.

        Collective over: the group.
        """
        self._wait()
        rows: dict[int, list[tuple[Member, torch.Tensor, int]]] = {
            at: [] for at in self.group.owned(self.round.matrices, self.group.me)
        }
        start = 0
        for member, at, span in self._incoming:
            values = self._gathered[start : start + span.numel]
            rows[at].append((self.group.members[member], values, span.start))
            start += span.numel
        done: dict[int, torch.Tensor] = {}
        with failures.kept():
            for at, parts in rows.items():
                found = self._orthogonal(at, parts)
                if not self.group.axes:
                    done[at] = found
                    continue
                for source, values, first in parts:  # results come where the directions were
                    self.group.matrices[at].take(found, source, values, first)
        if not self.group.axes:
            self._tell_all(done)
        elif len(self.group.members) > 1:
            self._under_way.append(
                self.group.comm.start_all_to_all(self._parts, self._gathered, self._out_counts, self._in_counts)
            )

    def _orthogonal(self, at: int, parts: Sequence[tuple[Member, torch.Tensor, int]]) -> torch.Tensor:
        """The flat result for a matrix of which members have sent these parts, from some element of their slice on."""
        matrix = self.group.matrices[at]
        whole = self._room(matrix.numel)
        for member, values, first in parts:
            matrix.put(whole, member, values, first)
        shape = matrix.shape if matrix.shape[0] > 1 else matrix.shape[1:]
        found = self.rule.orthogonal(whole.to(self.device).view(shape), self.groups[matrix.group])
        return found.reshape(-1).to(whole.device)

    def _tell_all(self, done: Mapping[int, torch.Tensor]) -> None:
        """Start to give all ranks the results of each owner."""
        self._results = []
        for owner in range(len(self.group.members)):
            owned = self.group.owned(self.round.matrices, owner)
            if owner == self.group.me and owned and len(done) == len(owned):
                found = torch.cat([done[at] for at in owned])
            else:
                found = self._room(sum(self.group.matrices[at].numel for at in owned))
            self._results.append(found)
            if owned and len(self.group.members) > 1:
                self._under_way.append(self.group.comm.start_broadcast(found, root=owner))

    # -- results -----------------------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Wait for the results of this rank's parts."""
        self._wait()
        if self.group.axes:
            return
        me, found = self.group.members[self.group.me], {}
        for owner, values in enumerate(self._results):
            start = 0
            for at in self.group.owned(self.round.matrices, owner):
                matrix = self.group.matrices[at]
                whole = values[start : start + matrix.numel]
                start += matrix.numel
                part = self.group.part(matrix, me)
                if matrix.cuts:
                    mine = self._room(part.numel)
                    matrix.take(whole, me, mine, part.start)
                    found[at] = part, mine
                else:
                    found[at] = part, whole
        self._sent = found

    def apply(self, window: Window) -> None:
        """Update the masters of a window."""
        for at, span, common in self._overlaps(window):
            part, values = self._sent[at]
            own = common.shifted(-span.start).intersect(part)
            inner = _narrowed(window, common.shifted(-window.key[2]))
            self.rule.apply(inner, values[own.shifted(-part.start).slice], self.group.matrices[at].shape[1:])

    def drop(self) -> None:
        """Give the memory of the messages back."""
        self._sent, self._results = {}, []
        del self._parts, self._gathered

    def _overlaps(self, window: Window) -> Iterator[tuple[int, Span, Span]]:
        """Matrices of which a window has elements: their ranges in its unit, and the common ones."""
        own = Span(window.key[2], window.key[2] + window.master.numel())
        for at, span in self.group.by_unit[window.key[0]]:
            common = span.intersect(own)
            if common.numel:
                yield at, span, common

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()

    def _room(self, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.group.dtype, device=self.group.device)


def _is_for(rule: Matrixwise, groups: Sequence[dict[str, Any]], unit: Unit) -> bool:
    """True if the parameters of a unit are matrices; a unit holds parameters with the same states."""
    return any(rule.is_for_matrices(groups[entry.group]) for entry in unit.layout.entries[:1])


def _narrowed(window: Window, span: Span) -> Window:
    """A range of a window, with its master and `out`."""
    if span.numel == window.master.numel():
        return window
    out = None if window.out is None else window.out[span.slice]
    return replace(window, master=window.master[span.slice], grad=window.grad[span.slice], out=out, state={})
