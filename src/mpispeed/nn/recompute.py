"""Recomputation: run a function without keeping its intermediate results, and run it again when backward needs them.

Tensors that autograd would save inside of the function are replaced by places. The first place that backward looks up
makes the function run again, with the random numbers and settings of its first run; that fills all places. It does not
depend on the inputs: it works whether or not they need gradients, and gradients of any part of the graph may be asked
for.

Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from mpispeed.base import rng
from mpispeed.base.errors import UsageError

OUTSIDE = -1
"""What torch gives as number of the backward pass where there is none."""


class Inputs(Protocol):
    """The stored arguments of a call."""

    def restore(self) -> tuple[Any, ...]:
        """The arguments, detached from the graph they came from."""


class Handle(Protocol):
    """A tensor that can be restored."""

    def get(self) -> torch.Tensor:
        """The tensor."""


class Recorder(Protocol):
    """Interface of the innermost checkpointed call that is running."""

    def keep(self, tensor: torch.Tensor) -> Handle:
        """Keep a tensor the way the call keeps intermediate results."""


class Place:
    """Placeholder of a tensor saved inside of a call, filled by recomputation."""

    __slots__ = ("__weakref__", "index", "kind", "region", "value", "version")

    def __init__(self, region: Region, index: int, kind: tuple[Any, ...]) -> None:
        self.region, self.index, self.kind = region, index, kind
        self.value: torch.Tensor | None = None
        self.version = 0

    def get(self) -> torch.Tensor:
        """The tensor, after another run of the call if it is not there."""
        return self.region.find(self)


class Region:
    """One checkpointed call: the state needed to run it again.

    It lives as long as its graph.
    """

    def __init__(self, function: Callable[..., Any], inputs: Inputs) -> None:
        self.function, self.inputs = function, inputs
        self.surroundings = Surroundings()
        self.places: list[weakref.ref[Place]] = []
        self.on_backward: Callable[[], None] | None = None
        self._pass = OUTSIDE
        self._runs = 0

    def run(self, args: tuple[Any, ...]) -> Any:
        """The first run."""
        with _recording(_First(self)):
            return self.function(*args)

    def find(self, place: Place) -> torch.Tensor:
        """The tensor of `place`. It is given away: backward frees it as it goes on."""
        current = _current_pass()
        if current != self._pass:
            self._forget()
        value = place.value
        if value is None:
            self._run_again(current)
            value = place.value
        if value is None:
            msg = f"tensor {place.index} that {_name(self.function)} saves for backward was not computed again; {_SAME}"
            raise UsageError(msg)
        if value._version != place.version:
            # With hooks autograd does not compare versions itself.
            msg = (
                f"tensor {place.index} that {_name(self.function)} saves for backward was changed in place after "
                f"that: {_said(place.kind)}; compute with a copy instead"
            )
            raise UsageError(msg)
        # Repeated lookups in one backward would run the call again each time: kept from the second run on.
        if self._runs == 1:
            place.value = None
        if current == OUTSIDE:
            self._forget()
        return value

    def _run_again(self, current: int) -> None:
        if current != OUTSIDE:
            # Tensors left over when this pass ends are not needed any more.
            reference = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(reference))
            if self._runs == 0 and self.on_backward is not None:
                self.on_backward()
        self._pass, self._runs = current, self._runs + 1
        with torch.no_grad():
            args = self.inputs.restore()
        again = _Again(self)
        with self.surroundings.restored(), _recording(again):
            try:
                self.function(*args)
            except _Complete as done:
                if done.recorder is not again:
                    raise
        again.check()

    def _forget(self) -> None:
        self._pass, self._runs = OUTSIDE, 0
        for reference in self.places:
            place = reference()
            if place is not None:
                place.value = None


def _forget(reference: weakref.ref[Region]) -> None:
    region = reference()
    if region is not None:
        region._forget()


def _current_pass() -> int:
    return int(torch._C._current_graph_task_id())


class Surroundings:
    """State that a function may depend on besides its arguments: random numbers and automatic casts."""

    def __init__(self) -> None:
        self._random, self._others = rng.capture_torch(), rng.capture_others()
        self._streams = rng.get_rng_tracker().get_states()
        self._casts = {
            device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in self._random
        }
        self._has_cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Context with the state of the first run, with gradients; random numbers go on as before afterwards."""
        tracker = rng.get_rng_tracker()
        before, others, streams = rng.capture_torch(), rng.capture_others(), tracker.get_states()
        try:
            rng.restore_torch(self._random)
            rng.restore_others(self._others)
            tracker.set_states(self._streams)
            with contextlib.ExitStack() as stack:
                for device, (is_on, dtype) in self._casts.items():
                    if is_on or torch.is_autocast_enabled(device):
                        cast = torch.autocast(device, dtype=dtype, enabled=is_on, cache_enabled=self._has_cache)
                        stack.enter_context(cast)
                stack.enter_context(torch.enable_grad())
                yield
        finally:
            rng.restore_torch(before)
            rng.restore_others(others)
            tracker.set_states(streams)


# -- recorders ---------------------------------------------------------------------------------------------------------


_running = threading.local()


def innermost() -> Recorder | None:
    """The recorder of the innermost checkpointed call that runs on this thread."""
    stack: list[Recorder] = getattr(_running, "stack", [])
    return stack[-1] if stack else None


def is_running_again() -> bool:
    """True within a second run of a function: in a recorder's, in any pass that backward starts, and in `repeating`."""
    return getattr(_running, "repeats", False) or isinstance(innermost(), _Again) or _current_pass() != OUTSIDE


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """Context of a forward pass that repeats another one, which modules have counted already."""
    before, _running.repeats = getattr(_running, "repeats", False), True
    try:
        yield
    finally:
        _running.repeats = before


@contextlib.contextmanager
def _recording(recorder: _First | _Again) -> Iterator[None]:
    """Let autograd and calls inside save with `recorder`."""
    if not hasattr(_running, "stack"):
        _running.stack = []
    _running.stack.append(recorder)
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.load):
            yield
    finally:
        _running.stack.pop()


class _Complete(Exception):
    """Raised when everything that backward needs has been recomputed; the rest of the function is not needed.

    No BaseException: hooks of modules that always run are told about exceptions only.
    """

    def __init__(self, recorder: _Again) -> None:
        super().__init__()
        self.recorder = recorder


class _First:
    """The first run: places instead of tensors."""

    def __init__(self, region: Region) -> None:
        self._region = region

    def save(self, tensor: torch.Tensor) -> Place:
        region = self._region
        place = Place(region, len(region.places), _kind(tensor))
        region.places.append(weakref.ref(place))
        return place

    def load(self, place: Place) -> torch.Tensor:
        return place.get()

    keep = save


class _Held:
    """A tensor, kept as it is."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get(self) -> torch.Tensor:
        return self._tensor


class _Again:
    """Another run: fills the places in the order in which they were made."""

    def __init__(self, region: Region) -> None:
        self._region = region
        # Fixed here: backward may need places of a function whose first run has not ended yet.
        self._expected, self._count = len(region.places), 0

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        # Detached, because it would keep this run's graph.
        value = tensor.detach()
        if self._count < self._expected:
            place = self._region.places[self._count]()
            if place is not None:
                self._check_kind(place, tensor)
                place.value, place.version = value, value._version
        self._count += 1
        if self._count >= self._expected:
            raise _Complete(self)
        return value

    def load(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def keep(self, tensor: torch.Tensor) -> Handle:
        return _Held(self.save(tensor))

    def check(self) -> None:
        """Check that all places were filled."""
        if self._count < self._expected:
            msg = (
                f"{_name(self._region.function)} saved {self._expected} tensors for backward in its forward pass and "
                f"{self._count} when it was run again; {_SAME}"
            )
            raise UsageError(msg)

    def _check_kind(self, place: Place, tensor: torch.Tensor) -> None:
        found = _kind(tensor)
        if found != place.kind:
            msg = (
                f"tensor {place.index} that {_name(self._region.function)} saves for backward was {_said(place.kind)} "
                f"in its forward pass and {_said(found)} when it was run again; {_SAME}"
            )
            raise UsageError(msg)


_SAME = (
    "a checkpointed function has to do the same in both runs: look for a dependence on something besides its "
    "arguments and random numbers that has changed in between"
)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _said(kind: tuple[Any, ...]) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} of {dtype} on {device}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__
