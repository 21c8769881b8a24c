"""The interface of an exchange, and sums in full precision, which need nothing beside them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection
    from contextlib import AbstractContextManager

    from mpispeed.base.events import Bus
    from mpispeed.exchange.saved import Loading, Run, Saved
    from mpispeed.optim.rule import Rule
    from mpispeed.sharding.grads import UnitExchange


class ExchangeStrategy:
    """The way in which data-parallel ranks come to one update. This one: sums of gradients, the same at every step.

    Attributes:
        units: agrees on gradients, unit by unit.
        is_phased: updates differ by their number: `begin` is called before the first gradient of each, `before_update`
            (or `drop`) and `after_update` around each.
        has_scaled_state: a checkpoint has state that depends on the loss scale, for `read_scaled`.
    """

    is_phased = False
    has_scaled_state = False

    def __init__(self, units: UnitExchange, rule: Rule) -> None:
        self.units, self._rule = units, rule

    # -- updates -----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Prepare for the gradients of update number `step`. Local."""

    def before_update(self, step: int, multiplier: float) -> float:
        """Agree on what update `step` needs; gradients count times `multiplier`.

        Returns the multiplier that the update still has to apply.

        Collective over: the data axis.
        """
        return multiplier

    def drop(self) -> None:
        """Forget what was agreed on for the coming update, because the step is skipped. Local."""

    def after_update(self, step: int) -> None:
        """Agree on what update `step` has left. Collective over: the data axis."""

    # -- parameters that differ between ranks ------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """True if parameters differ between data ranks."""
        return False

    @property
    def has_local_params(self) -> bool:
        """True while the model has this rank's own parameters, which differ from those of other ranks."""
        return False

    def show(self, *, is_training: bool, is_refreshed: bool = False) -> None:
        """Give the model its local parameters for training, or the common ones, where data ranks differ. Local.

        Args:
            is_training: show the local parameters; else the common ones.
            is_refreshed: parameters were just written from masters.

        Raises:
            UsageError: states that this needs are offloaded.
        """

    def common(self) -> AbstractContextManager[None]:
        """Context in which the model holds parameters that are equal on all data ranks."""
        return nullcontext()

    # -- state -------------------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of the exchange's own state on this rank, by kind."""
        return {}

    def forget(self) -> None:
        """Drop errors and copies, because states are replaced. Local."""
        self.units.rescale(1.0, is_overflow=True)

    def drop_local(self) -> None:
        """Drop what ranks did by themselves since they last agreed, because masters are replaced. Local."""

    def saved(self, run: Run) -> Saved | None:
        """What goes into a checkpoint; None: nothing. Collective over: all ranks."""
        return None

    def scalars(self) -> dict[str, Any]:
        """Scalars of the rule, for a checkpoint. Collective over: all ranks."""
        return self._rule.scalars()

    def check_fresh(self, loading: Loading, names: Collection[str]) -> None:
        """Look at parameters whose optimizer state is not in the checkpoint. Local.

        Raises:
            CheckpointError: the update cannot do without it.
        """

    def read(self, loading: Loading) -> None:
        """Read what depends on optimizer states, after these and before counters. Local.

        Raises:
            CheckpointError: it is damaged.
        """

    def spread(self) -> None:
        """Gather what ranks have read for others in `read`. Collective over: the data axis."""

    def read_scaled(self, loading: Loading) -> None:
        """Read what depends on the loss scale, after it was loaded. Local.

        Raises:
            CheckpointError: it is damaged.
        """

    def spread_scaled(self) -> None:
        """Gather what ranks have read for others in `read_scaled`. Collective over: the data axis."""

    # -- reports -----------------------------------------------------------------------------------------------------

    def watch(self, bus: Bus, every: int | None) -> None:
        """Attach reports to a run, in the log every `every` steps; called on rank 0."""
