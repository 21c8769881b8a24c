"""Changes of batch sizes in the middle of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.engine.backward import Accumulation
    from mpispeed.engine.parts import Parts
    from mpispeed.engine.plan import Plan


class BatchSizes:
    """What an engine offers to change its batch."""

    parts: Parts
    plan: Plan
    _accumulation: Accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps only.

        Raises:
            ConfigError: it is no multiple of micro-batch size times data-parallel ranks.
        """
        self._set_batch(self.plan.batch.with_train_batch_size(train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size; the accumulation steps stay, the global batch follows.

        For loaders of the caller: `training_dataloader` goes on with the micro-batches it was made for.
        """
        self._set_batch(self.plan.batch.with_micro_batch_size(micro_batch_size))

    def _set_batch(self, batch: Any) -> None:
        self.plan = self.parts.plan = self.plan.with_batch(batch)
        self._accumulation.steps = batch.gradient_accumulation_steps
