"""The 1-bit exchange: its updates, with their part of checkpoints and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.exchange.onebit import report, state
from mpispeed.exchange.onebit.updates import OneBitUpdates

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpispeed.base.events import Bus
    from mpispeed.exchange.saved import Loading, Run
    from mpispeed.store.layout import Unit


class OneBitExchange(OneBitUpdates):
    """The strategy of 1-bit optimizers."""

    _cut: tuple[Unit, ...] = ()  # units whose worker errors each rank has read for its chunk only

    def saved(self, run: Run) -> state.CodedTensors:
        """Errors and states of single ranks. Collective over: all ranks."""
        return state.CodedTensors(self, run.layout)

    def scalars(self) -> dict[str, Any]:
        """As in `ExchangeStrategy`: a stage, or a shard of it, may have no parameter of some group."""
        return state.merge_nested(self.mesh.world.comm.gather_objects(self.rule.scalars()))

    def check_fresh(self, loading: Loading, names: Collection[str]) -> None:
        """As `state.refuse_still`. Local."""
        state.refuse_still(self, loading, names)

    def read(self, loading: Loading) -> None:
        """As `state.read`. Local."""
        self._cut = tuple(state.read(self, loading))

    def spread(self) -> None:
        """Gather the chunks of worker errors that ranks have read. Collective over: the data axis."""
        units, self._cut = self._cut, ()
        for unit in units:
            self.coder.compressor.collect(self.coder.errors_of(unit))

    def watch(self, bus: Bus, every: int | None) -> None:
        """Attach the report and the warning of an early freeze."""
        report.watch(self, bus, every)
