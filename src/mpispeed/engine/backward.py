"""Backward passes: checks and scaling of the loss, accumulation boundaries, and counters of steps."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Counters:
    """Steps, samples and updates of a run."""

    micro_steps: int = 0
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    boundary_micro_steps: int = 0  # micro_steps when the last global batch ended
    pending_backwards: int = 0  # backward passes since then, whose gradients no update has used yet
    has_failed: bool = (
        False  # a pass of this batch failed on this rank, or one that it depends on: no update may follow
    )
    updates_before_state: int = 0  # updates made before the optimizer state was last reset

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
        self.skipped_steps += is_skipped
        self.global_steps += 1
        self.global_samples += train_batch_size
        self.boundary_micro_steps = self.micro_steps + 1
        self.pending_backwards = 0


log = logging.getLogger(__name__)


class Accumulation:
    """Accumulation boundaries; `override` sets the boundary by hand, `is_local` is True inside `no_sync`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.override: bool | None = None
        self.is_local = False

    def is_boundary(self, finished: int) -> bool:
        """True if the micro-batch that follows `finished` ones is the last of its global batch."""
        return finished + 1 >= self.steps if self.override is None else self.override

    def warn_of_fewer(self, backwards: int, finished: int) -> None:
        """Warn before an update if there were fewer backward passes than micro-batches (`finished` + 1)."""
        if self.override is None and 0 < backwards <= finished:
            logs.once(
                log,
                logging.WARNING,
                f"{backwards} backward passes for {finished + 1} micro-batches of an update; the gradients of the "
                "others count as zeros in the mean",
            )

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
