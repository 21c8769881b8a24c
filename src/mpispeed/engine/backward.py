"""The backward pass of a loss: which are allowed, scaling, and where a global batch ends."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)


class Accumulation:
    """Counts micro-batches; `override` decides by hand; `is_local` is True inside `no_sync`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.override: bool | None = None
        self.is_local = False

    def is_boundary(self, finished: int) -> bool:
        """True if the micro-batch after `finished` ones of this global batch ends it."""
        return finished + 1 >= self.steps if self.override is None else self.override

    @contextmanager
    def local(self) -> Iterator[None]:
        """The time inside `no_sync`.

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
    """Refuse what is no tensor of one element.

    Raises:
        UsageError: it is none; `place` needs one, and `remedy` is what to do.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return
    is_tensor = isinstance(loss, torch.Tensor)
    found = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
    msg = f"{place} needs one scalar loss, found {found}; {remedy}"
    raise UsageError(msg)


def backward_scaled(loss: torch.Tensor, scale: float, *, retain_graph: bool = False) -> None:
    """The backward pass of a scalar loss times `scale`, a product that float16 might not hold."""
    (loss.float() * scale if scale != 1.0 else loss).backward(retain_graph=retain_graph)
