"""Backward passes that a script starts itself with `loss.backward()`, over one engine or several."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.events import Event
from mpispeed.engine.backward import divisor_in_force, end_scale, scale_in_force, scaled
from mpispeed.sharding.module_hooks import in_backward
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.engine.backward import Accumulation
    from mpispeed.engine.build.parts import Parts


@dataclass(slots=True)
class DirectPass:
    """A backward pass that the engine did not start itself.

    Attributes:
        is_open: its first gradient has come, its end has not.
        outlives: a nested pass (reentrant activation checkpointing) has ended, and autograd calls nothing at the end of
            the outer one: the next gradient, or the next call of the engine, ends it.
        began: when its first gradient came, in seconds of `time.perf_counter`.
    """

    is_open: bool = False
    outlives: bool = False
    began: float = 0.0


class DirectBackward:
    """Engine methods for a script's own backward passes: the first gradient begins one, autograd's callback ends it.

    Source: DeepSpeed's documentation, "Jointly Training Models With Shared Loss", and its backward API like torch's
    (DeepSpeed pull request 7665).
    """

    parts: Parts
    _accumulation: Accumulation
    _direct: DirectPass
    _require: Callable[..., None]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for `engine.scale(loss).backward()`; without fp16 `loss` itself. Local."""
        return scaled(loss, self.parts.scaler.scale)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Complete the gradient reductions now; `step` completes those that are left.

        Args:
            bucket_size: no effect; `zero_optimization.reduce_bucket_size` counts.

        Collective over: the data axis.

        Raises:
            UsageError: there is no optimizer.
        """
        self._settle_direct()
        if self.parts.optimization is None:
            msg = "engine.allreduce_gradients() needs an optimizer: set one in the config or pass it to initialize"
            raise UsageError(msg)
        self.parts.optimization.grads.finish(codes=False)

    def _backward_prologue(self) -> None:
        """No operation: a pass begins with its first gradient. Scripts call this before `loss.backward()`."""

    def _backward_epilogue(self) -> None:
        """End a pass that autograd has not ended. Scripts call this after `loss.backward()`."""
        self._settle_direct()

    def _listen(self) -> None:
        """Register `_expect_gradient` with the gradient hooks."""
        if self.parts.optimization is not None:
            self.parts.optimization.hooks.listen(self._expect_gradient)

    def _expect_gradient(self) -> None:
        """Begin a direct pass if none is open; called before a gradient is accumulated. Local.

        Raises:
            UsageError: its loss was not multiplied by the loss scale of this engine.
        """
        direct, grads = self._direct, self.parts.optimization.grads  # type: ignore[union-attr]
        if grads.is_open and not direct.outlives:
            return
        if not grads.is_open:
            self._require("backward", (Kind.lp_params, Kind.lp_grads))
            _check_scale(self.parts.scaler.scale)
            is_local, steps = self._accumulation.is_local, self.parts.plan.batch.gradient_accumulation_steps
            is_due = self._accumulation.is_boundary(self.parts.counters.finished_micro_steps)
            factor = divisor_in_force() / (1 if is_local else steps)  # another engine may have divided the loss
            grads.begin_backward(reduces=is_due and not is_local, factor=factor)
            direct.is_open, direct.began = True, time.perf_counter()
        direct.outlives = False
        end = weakref.WeakMethod(self._end_of_autograd)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: (method := end()) and method())

    def _end_of_autograd(self) -> None:
        """Autograd's callback: no nodes are left to run, or a nested pass has returned to the node that began it."""
        if self._direct.is_open:
            self._direct.outlives = torch._C._current_autograd_node() is not None
            if not self._direct.outlives:
                self._end_direct()

    def _settle_direct(self) -> None:
        """End a pass that outlived a nested one; discard a pass that an exception broke off."""
        if in_backward():
            return
        end_scale()
        if self._direct.outlives:
            self._end_direct()
        elif self.parts.optimization is not None:
            self._direct.is_open = self.parts.optimization.grads.is_open = False

    def _end_direct(self) -> None:
        self._direct.is_open = self._direct.outlives = False
        self.parts.end_backward()
        self.parts.bus.announce(Event.BACKWARD_END, seconds=time.perf_counter() - self._direct.began)


def _check_scale(own: float) -> None:
    """Refuse gradients of a loss that was not multiplied by `own`.

    Raises:
        UsageError: the loss was multiplied by another factor.
    """
    found = scale_in_force()
    if found == own:
        return
    if found == 1.0:
        msg = (
            f"loss.backward() with fp16 needs a loss that is multiplied by the loss scale, {own:g} now: call "
            "engine.scale(loss).backward() or engine.backward(loss)"
        )
    else:
        msg = (
            f"gradients of a loss that another engine multiplied by its loss scale, {found:g}, reach an engine whose "
            f"own is {own:g}; engines that share a loss need the same: use bf16, or the same static fp16.loss_scale"
        )
    raise UsageError(msg)
