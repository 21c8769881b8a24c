"""Engine methods for batch sizes, and for what the last step was: norm, learning rates, whether it was applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import UsageError
from mpispeed.engine import deepspeed_getters

if TYPE_CHECKING:
    from mpispeed.engine.backward import Accumulation
    from mpispeed.engine.build.parts import Parts
    from mpispeed.plan.plan import Plan


class Settings:
    """Engine methods for batch sizes and getters of the last step."""

    parts: Parts
    plan: Plan
    _accumulation: Accumulation
    _was_step_applied: bool
    _norm: float | None

    # -- batch sizes -----------------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch by changing the accumulation steps only.

        Raises:
            ConfigError: it is not a multiple of micro-batch size times data-parallel ranks.
        """
        self._set_batch(self.plan.batch.with_train_batch_size(train_batch_size))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the micro-batch size and with it the global batch; the accumulation steps stay.

        For the caller's own loaders: `training_dataloader` keeps the micro-batch size it was made with.
        """
        self._set_batch(self.plan.batch.with_micro_batch_size(micro_batch_size))

    def _set_batch(self, batch: Any) -> None:
        self.plan = self.parts.plan = self.plan.with_batch(batch)
        self._accumulation.steps = batch.gradient_accumulation_steps

    def _require_whole_grads(self, what: str) -> None:
        """Require gradients that a rank can keep to itself.

        Raises:
            UsageError: gradients are sharded over ranks.
        """
        if self.parts.optimization and not self.parts.optimization.grads.shards.rest.is_replicated:
            msg = (
                f"{what} is incompatible with gradients that are partitioned over ranks "
                f"(zero_optimization.stage {self.plan.stage}); use stage 0 or 1, or gradient_accumulation_steps"
            )
            raise UsageError(msg)

    # -- getters -----------------------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """True if the last `step()` changed parameters."""
        return self._was_step_applied

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the gradients at the last applied step, before clipping, unscaled; None before the first."""
        return self._norm

    def get_lr(self) -> list[float]:
        """Learning rate of each parameter group; empty without an optimizer."""
        return deepspeed_getters.group_values(self.parts.optimization, "lr", 0.0)

    def get_mom(self) -> list[Any]:
        """Momentum or betas of each parameter group."""
        return deepspeed_getters.momenta(self.parts.optimization)
