"""Additional memory and traffic of 1-bit optimizers, for predictions: those of the compressor of a run on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mpispeed.exchange.cost import ExchangeCost, Facts, Phase, Sent
from mpispeed.exchange.onebit.compressor import Compressor
from mpispeed.exchange.onebit.plan import PHASES, OneBitPlan
from mpispeed.mesh.compressed.onebit_nodes import zero_errors
from mpispeed.optim.exchange import Exchange
from mpispeed.store.dry import META
from mpispeed.store.placement import REPLICATED
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Unit

SUBJECTS = {
    Exchange.CODED_GRADIENT: "gradients",
    Exchange.MOMENTUM: "momenta",
    Exchange.DRIFT: "local updates",
}
"""The values exchanged in a step, by kind of exchange."""

_ITEM = torch.float32.itemsize


class OneBitCost(ExchangeCost):
    """Costs of the exchanges of a 1-bit optimizer."""

    def __init__(self, coding: OneBitPlan) -> None:
        self._coding = coding
        self.own_masters = coding.own_masters

    # -- memory ------------------------------------------------------------------------------------------------------

    def held(self, facts: Facts, unit: Unit) -> Iterator[tuple[str, int]]:
        """The full momentum that is kept beside its sharded slot from the first exchange on, and errors."""
        is_kept = Exchange.MOMENTUM in self._coding.kinds and not facts.master.is_replicated
        yield "1-bit momentum", _ITEM * unit.layout.padded if is_kept else 0
        yield "1-bit errors", self._error_bytes(facts, unit)

    def _error_bytes(self, facts: Facts, unit: Unit) -> int:
        """Bytes of worker and server errors, once the unit was exchanged."""
        inner, workers = self._grid(facts)
        return zero_errors(unit.layout.padded, inner, workers, META).nbytes

    def buffer_bytes(self, facts: Facts, buffers: int) -> int:
        """As in `ExchangeCost`: an exchange reads a unit at once."""
        longest = max((facts.span(unit, unit.states.master) for unit in facts.table.units), default=0)
        if self._coding.lends_units:
            return longest * (_ITEM + facts.state_bytes)
        return max(buffers, longest * _ITEM)

    def saved_bytes(self, facts: Facts, unit: Unit) -> int:
        """Errors, and states that differ between ranks."""
        return self._error_bytes(facts, unit) + self._coding.local_slots * _ITEM * unit.layout.padded

    def _grid(self, facts: Facts) -> tuple[int, int]:
        """Ranks that average before the 1-bit exchange, and workers of the exchange."""
        if self._coding.hops is None:
            return 1, facts.topology.group_size("data")
        return facts.topology.group_size(self._coding.hops[0]), facts.topology.group_size(self._coding.hops[1])

    # -- traffic -----------------------------------------------------------------------------------------------------

    def phases(
        self, facts: Facts, full: Sequence[Sent], updates: Iterable[Sent], every: Iterable[Sent]
    ) -> Iterator[Phase]:
        """As in `ExchangeCost`."""
        coding = self._coding
        last, always = coding.freeze_step, (*updates, *every)
        when = {
            Exchange.GRADIENT: f"up to update {last}" + (", ever more rarely" if coding.own_masters else ""),
            Exchange.CODED_GRADIENT: f"the others up to update {last}",
            Exchange.MOMENTUM: f"from update {last + 1}",
            Exchange.NOTHING: f"from update {last + 1}",
            Exchange.DRIFT: f"from update {last + 1}, where ranks meet",
        }
        yield Phase(PHASES[Exchange.GRADIENT], when[Exchange.GRADIENT], tuple(full))
        for kind in coding.kinds:
            rows = [*self._exchanged(facts, kind), *always]
            yield Phase(PHASES[kind], when[kind], tuple(rows))
            if kind is Exchange.MOMENTUM and not facts.master.is_replicated:
                rows += _widened(facts)  # kept from then on
                yield Phase(f"first {PHASES[kind]}", f"update {last + 1}, or after loading", tuple(rows))

    def _exchanged(self, facts: Facts, kind: Exchange) -> list[Sent]:
        """Traffic of the exchange of all units."""
        if kind not in SUBJECTS:
            return []

        def run(mesh: Mesh) -> None:
            compressor = Compressor(mesh, self._coding.hops)
            for unit in facts.table.units:
                out = torch.empty(unit.layout.padded, device=META)
                errors = compressor.zeros(out.numel(), META)
                compressor.mean(out, errors, compressor.values(errors, out.numel()), ())

        return _traced(facts, SUBJECTS[kind], run)


def _widened(facts: Facts) -> list[Sent]:
    """Traffic of gathering sharded momenta, and one byte per element that marks zeros of the variance."""
    rows = []
    for what, dtype in (("momenta", torch.float32), ("zeros of the variance", torch.uint8)):

        def run(mesh: Mesh, dtype: torch.dtype = dtype) -> None:
            for unit in facts.table.units:
                master, padded = unit.states.master, unit.layout.padded
                own = torch.empty(facts.span(unit, master), dtype=dtype, device=META)
                whole = torch.empty(padded, dtype=dtype, device=META)
                all_gather_into(mesh, whole, own, master, REPLICATED, padded)

        rows += _traced(facts, what, run)
    return rows


def _traced(facts: Facts, what: str, run: Callable[[Mesh], None]) -> list[Sent]:
    """The trace of `run` on a mesh on which nothing moves."""
    mesh = facts.dry_mesh()
    run(mesh)
    return [Sent(what, verb, axes, entry.bytes) for (verb, axes), entry in mesh.comm_trace.entries().items()]
