"""Timers of checkpointed calls, and synchronization with the device at their ends."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mpispeed.nn.saved_inputs import map_tensors

log = logging.getLogger(__name__)


class Boundaries:
    """Actions at the begin and the end of the forward and of the backward pass of each call."""

    def __init__(self, *, synchronizes: bool, profiles: bool) -> None:
        self._synchronizes, self._profiles = synchronizes, profiles
        self.timers = {"forward": Timer(), "backward": Timer()}

    @property
    def is_on(self) -> bool:
        """True if there is anything to do."""
        return self._synchronizes or self._profiles

    @contextlib.contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """The forward pass of call `number`."""
        if not self.is_on:
            yield
            return
        begin = self.begin()
        yield
        self.end("forward", number, begin)

    def begin(self) -> float:
        """The time, after the device has finished its queued work."""
        self._wait()
        return time.perf_counter()

    def end(self, name: str, number: int, begin: float) -> None:
        """Count the time since `begin` and log it."""
        self._wait()
        if self._profiles:
            seconds = time.perf_counter() - begin
            self.timers[name].seconds += seconds
            self.timers[name].count += 1
            log.info("checkpointed call %d: %s %.3f ms", number, name, 1e3 * seconds)

    def watched(self, args: tuple[object, ...]) -> tuple[tuple[object, ...], list[torch.Tensor]]:
        """Arguments to call with, and those among them whose gradients are complete when the call's backward ends.

        A view in place of each argument that needs a gradient: the argument itself may be used elsewhere too.
        """
        views: list[torch.Tensor] = []

        def view(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or isinstance(tensor, torch.nn.Parameter):
                return tensor
            seen = tensor.view_as(tensor)
            vars(seen).update(vars(tensor))  # marks
            views.append(seen)
            return seen

        changed: tuple[object, ...] = map_tensors(args, view)
        return changed, views

    def _wait(self) -> None:
        if self._synchronizes and torch.accelerator.is_available():
            torch.accelerator.synchronize()


class BackwardPass:
    """The backward passes of one call: each begins when the call runs again and ends with its inputs' gradients.

    Where no input needs a gradient, or not all get one, it ends with the whole backward pass.
    """

    def __init__(self, boundaries: Boundaries, number: int, views: Sequence[torch.Tensor]) -> None:
        self._boundaries, self._number = boundaries, number
        self._began: float | None = None
        if views:
            torch.autograd.graph.register_multi_grad_hook(list(views), lambda _: self._end())

    def begin(self) -> None:
        """Note that the call is about to be recomputed."""
        self._began = self._boundaries.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._began is not None:
            began, self._began = self._began, None
            self._boundaries.end("backward", self._number, began)


@dataclass(slots=True)
class Timer:
    """Accumulated time of one name."""

    seconds: float = 0.0
    count: int = 0
