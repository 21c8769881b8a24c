"""Backward passes, started by the engine or by `loss.backward()`: their losses, accumulation, and counters of steps."""

from __future__ import annotations

import logging
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import UsageError
from mpispeed.base.events import Event
from mpispeed.sharding.module_hooks import in_backward
from mpispeed.sharding.param_shards import OffloadStateTypeEnum as Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpispeed.base.clock import Clock
    from mpispeed.base.events import Bus
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.grads import GradStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """Steps, samples and updates of a run."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    known_skips: int = 0  # steps without an update, of those whose outcome the host knows
    boundary_micro_steps: int = 0  # micro_steps when the last global batch ended
    pending_backwards: int = 0  # backward passes since then, whose gradients no update has used yet
    has_failed: bool = (
        False  # a pass of this batch failed on this rank, or one that it depends on: no update may follow
    )
    updates_before_state: int = 0  # updates made before the optimizer state was last reset
    settle: Callable[[], None] = field(default=lambda: None, compare=False)  # learns how the last step ended

    @property
    def skipped_steps(self) -> int:
        """Steps without an update. May wait for the device."""
        self.settle()
        return self.known_skips

    @skipped_steps.setter
    def skipped_steps(self, count: int) -> None:
        self.known_skips = count

    @property
    def applied_steps(self) -> int:
        """Steps that changed parameters."""
        return self.global_steps - self.skipped_steps

    @property
    def update_count(self) -> int:
        """Updates that the optimizer state includes."""
        return self.global_steps - self.skipped_steps - self.updates_before_state

    @property
    def finished_micro_steps(self) -> int:
        """Micro-batches of the current global batch whose step is done."""
        return self.micro_steps - self.boundary_micro_steps

    def end_batch(self, train_batch_size: int, *, is_skipped: bool) -> None:
        """Count one global batch."""
        self.known_skips += is_skipped
        self.global_steps += 1
        self.global_samples += train_batch_size
        self.boundary_micro_steps = self.micro_steps + 1
        self.pending_backwards = 0


class Accumulation:
    """Accumulation boundaries; `override` sets the boundary by hand, `is_local` is True inside `no_sync`.

    Attributes:
        is_undivided: losses are not divided by `steps`: the sum of their gradients is, at its end.
    """

    def __init__(self, steps: int, counters: Counters, *, is_undivided: bool = False) -> None:
        self.steps, self._counters, self.is_undivided = steps, counters, is_undivided
        self.override: bool | None = None
        self.is_local = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """True from forward to step of the last micro-batch of a global batch."""
        return self._counters.finished_micro_steps + 1 >= self.steps if self.override is None else self.override

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set the boundary by hand; None returns to counting micro-batches."""
        self.override = is_boundary

    def warn_of_fewer(self) -> None:
        """Warn before an update if there were fewer backward passes than micro-batches."""
        backwards, steps = self._counters.pending_backwards, self._counters.finished_micro_steps + 1
        if self.override is None and 0 < backwards < steps:
            logs.once(
                log,
                logging.WARNING,
                f"{backwards} backward passes for {steps} micro-batches of an update; the gradients of the "
                "others count as zeros in the mean",
            )

    def check_factor(self, *, scale_wrt_gas: bool) -> None:
        """Refuse losses that the caller divides, where nothing is divided before the sum.

        Raises:
            UsageError: `scale_wrt_gas` is False.
        """
        if self.is_undivided and not scale_wrt_gas:
            msg = (
                'reduction "invariant": engine.backward(scale_wrt_gas=False) asks that the caller divides losses, but '
                "the sum over all micro-batches is divided once, at its end; leave the argument out, and give the "
                "mean loss of each micro-batch"
            )
            raise UsageError(msg)

    def require_summed(self) -> None:
        """Refuse an update inside of `no_sync`.

        Raises:
            UsageError: gradients are local.
        """
        if self.is_local:
            msg = "engine.step() inside no_sync would update from unsummed gradients; leave the context first"
            raise UsageError(msg)

    @contextmanager
    def overridden(self, is_boundary: bool) -> Iterator[None]:
        """Context in which the boundary is set by hand."""
        before, self.override = self.override, is_boundary
        try:
            yield
        finally:
            self.override = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """Context of `no_sync`.

        Raises:
            UsageError: entered twice.
        """
        if self.is_local:
            msg = "no_sync context manager reentry is unsupported: it is already active"
            raise UsageError(msg)
        self.is_local = True
        try:
            yield
        finally:
            self.is_local = False


def scale_loss(loss: Any, steps: int) -> Any:
    """`loss / steps` for a tensor, element by element for lists and tuples; other types pass with one warning."""
    if steps == 1:
        return loss
    if isinstance(loss, torch.Tensor):
        return loss / steps if loss.dtype in (torch.float32, torch.float64) else loss.float() / steps
    if isinstance(loss, list | tuple):
        return type(loss)(scale_loss(item, steps) for item in loss)
    logs.once(log, logging.WARNING, f"a loss of type {type(loss).__name__} is not divided by the accumulation steps")
    return loss


def require_scalar(loss: Any, place: str, remedy: str) -> None:
    """Refuse a loss that is not a tensor of one element.

    Raises:
        UsageError: `loss` is not one; the message names `place` and `remedy`.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    is_tensor = isinstance(loss, torch.Tensor)
    found = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
    msg = f"{place} needs one scalar loss, found {found}; {remedy}"
    raise UsageError(msg)


def backward_scaled(loss: torch.Tensor, scale: float, *, retain_graph: bool = False) -> None:
    """Run backward on `loss * scale`, a product in float32 that float16 might not hold."""
    scaled(loss, scale).backward(retain_graph=retain_graph)


@contextmanager
def divided(steps: int) -> Iterator[None]:
    """Context of a backward pass whose loss was divided by `steps`; other engines that it reaches see this too."""
    before, _InForce.divisor = _InForce.divisor, steps
    try:
        yield
    finally:
        _InForce.divisor = before


class _InForce:
    """Factors of the loss whose gradients autograd computes now."""

    scale = 1.0
    divisor = 1  # accumulation steps by which the loss was divided already


def end_scale() -> None:
    """Reset the factor after a backward pass. Autograd calls this at its end, but not if an exception ends it."""
    _InForce.scale = 1.0


def scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    """`loss` times `scale`, in float32; its backward pass sets `scale_in_force`, which gradients do not tell."""
    if scale == 1.0:
        return loss
    product = loss.float() * scale
    if product.requires_grad:

        def tell(_: torch.Tensor) -> None:
            _InForce.scale = scale
            torch.autograd.Variable._execution_engine.queue_callback(end_scale)

        product.register_hook(tell)
    return product


def scale_in_force() -> float:
    """The factor by which the loss of the running backward pass was multiplied."""
    return _InForce.scale


def divisor_in_force() -> int:
    """The number by which the loss of the running backward pass was divided."""
    return _InForce.divisor


# -- passes that a script starts --------------------------------------------------------------------------------------


class DirectBackward:
    """Backward passes that a script starts with `loss.backward()`, over one engine or several.

    The first gradient begins a pass, autograd's callback ends it.

    Source: DeepSpeed's documentation, "Jointly Training Models With Shared Loss", and its backward API like torch's
    (DeepSpeed pull request 7665).
    """

    def __init__(
        self,
        grads: GradStore | None,
        scaler: LossScale,
        accumulation: Accumulation,
        bus: Bus,
        *,
        clock: Clock,
        require: Callable[..., None],
        end_backward: Callable[[], None],
    ) -> None:
        """Args: `grads` is None without an optimizer; `require` and `end_backward` are those of the engine's parts."""
        self._grads, self._scaler, self._accumulation, self._clock = grads, scaler, accumulation, clock
        self._bus, self._require, self._end_backward = bus, require, end_backward
        self._is_open = False  # the first gradient of a pass has come, its end has not
        # A nested pass (reentrant activation checkpointing) has ended, and autograd calls nothing at the end of the
        # outer one: the next gradient, or the next call of the engine, ends it.
        self._outlives = False
        self._began: Any = None  # a mark of the clock

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """`loss` times the loss scale, for `engine.scale(loss).backward()`; without fp16 `loss` itself. Local."""
        return scaled(loss, self._scaler.scale)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Complete the gradient reductions now; `step` completes those that are left.

        Args:
            bucket_size: no effect; `zero_optimization.reduce_bucket_size` counts.

        Collective over: the data axis.

        Raises:
            UsageError: there is no optimizer.
        """
        self.settle()
        if self._grads is None:
            msg = "engine.allreduce_gradients() needs an optimizer: set one in the config or pass it to initialize"
            raise UsageError(msg)
        self._grads.finish(is_final=False)

    def expect_gradient(self) -> None:
        """Begin a pass if none is open; called before a gradient is accumulated. Local.

        Raises:
            UsageError: its loss was not multiplied by the loss scale of this engine.
        """
        grads = self._grads
        if grads is None or (grads.is_open and not self._outlives):
            return
        if not grads.is_open:
            self._require("backward", (Kind.lp_params, Kind.lp_grads))
            _check_scale(self._scaler.scale)
            is_local, steps = self._accumulation.is_local, self._accumulation.steps
            is_due = self._accumulation.is_gradient_accumulation_boundary()
            steps = 1 if is_local or self._accumulation.is_undivided else steps
            factor = divisor_in_force() / steps  # another engine may have divided the loss
            grads.begin_backward(reduces=is_due and not is_local, factor=factor)
            if self._clock.entering is not None:
                self._clock.entering("backward")
            self._is_open, self._began = True, self._clock.now()
        self._outlives = False
        end = weakref.WeakMethod(self._end_of_autograd)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: (method := end()) and method())

    def settle(self) -> None:
        """End a pass that outlived a nested one; discard a pass that an exception broke off."""
        if in_backward():
            return
        end_scale()
        if self._outlives:
            self._end()
        elif self._grads is not None:
            self._is_open = self._grads.is_open = False

    def _end_of_autograd(self) -> None:
        """Autograd's callback: no nodes are left to run, or a nested pass has returned to the node that began it."""
        if self._is_open:
            self._outlives = torch._C._current_autograd_node() is not None
            if not self._outlives:
                self._end()

    def _end(self) -> None:
        self._is_open = self._outlives = False
        self._end_backward()
        self._bus.announce(Event.BACKWARD_END, seconds=self._clock.now() - self._began)


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
