"""The cut of the sequence of the running pass, for attention layers, whose arguments do not say it.

Recomputation in backward asks again, maybe when a later pass has begun. `mark` makes the outputs of a pass tell which
one a backward pass belongs to; so does the backward pass of every attention layer. Where neither has told yet, passes
that had no backward pass so far are looked at, and have to agree.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch

from mpispeed.base.errors import UsageError
from mpispeed.base.tensor_tree import tensors
from mpispeed.nn.sequence.group import SequenceGroup
from mpispeed.nn.sequence.layout import Layout

_REMEMBERED = 64
"""Most passes without a backward pass that are kept: scripts may evaluate without `torch.no_grad`."""


@dataclass(frozen=True, eq=False)
class Running:
    """The cut of one pass.

    Attributes:
        group: ranks of the sequence axis; None: one process has the whole sequence.
        layout: the cut.
        is_causal: what attention layers that do not say it themselves take.
    """

    group: SequenceGroup | None
    layout: Layout
    is_causal: bool = True

    def __post_init__(self) -> None:
        """Check that group and cut fit.

        Raises:
            UsageError: they have other sizes.
        """
        inner, outer = (self.group.ulysses.size, self.group.ring.size) if self.group is not None else (1, 1)
        if (self.layout.ulysses, self.layout.ring) != (inner, outer):
            msg = (
                f"the sequence is cut over {self.layout.ulysses} x {self.layout.ring} ranks (Ulysses x ring), and its "
                f"group has {inner} x {outer}: make the layout with the sizes of the group"
            )
            raise UsageError(msg)

    @property
    def rank(self) -> int:
        """Place of this rank in the sequence axis."""
        return 0 if self.group is None else self.group.rank

    def is_cut_like(self, other: Running) -> bool:
        """Whether attention runs alike in both passes."""
        return self.group is other.group and self.layout == other.layout and self.is_causal == other.is_causal


@dataclass
class _State:
    forward: Running | None = None
    waiting: list[Running] = field(default_factory=list)
    """Passes that may still have a backward pass, of which nothing has told its own."""
    told: dict[int, Running] = field(default_factory=dict)
    """What the running backward passes belong to, by their number in torch."""


class _Here(threading.local):
    state: _State | None = None


_here = _Here()
_last: list[_State] = []
"""The state that a thread made last: backward passes of a device run on threads of torch."""


def _state() -> _State:
    if _here.state is None:
        if _task() != -1 and _last:
            return _last[0]
        _here.state = _State()
        _last[:] = [_here.state]
    return _here.state


def _task() -> int:
    """The number of the backward pass that runs on this thread; -1: none."""
    return int(torch._C._current_graph_task_id())


def current() -> Running | None:
    """The cut of the pass that runs, within backward that of the pass whose gradients are computed; None: no cut.

    Raises:
        UsageError: an attention layer is recomputed in backward, and it is not known which of two cuts it had.
    """
    state, task = _state(), _task()
    if task == -1:
        return state.forward
    if task not in state.told:
        found = state.waiting[-1] if state.waiting else state.forward
        if found is None:
            return None
        if not all(found.is_cut_like(other) for other in state.waiting):
            msg = (
                f"attention is recomputed in backward while {len(state.waiting)} passes with different cuts of their "
                "sequences wait for backward: run backward of one pass before the next begins, or mark the outputs of "
                "each pass (mpispeed.nn.sequence.running.mark)"
            )
            raise UsageError(msg)
        state.told[task] = found
    return state.told[task]


P = ParamSpec("P")
T = TypeVar("T")


class Eager(Generic[P, T]):
    """A function that asks for the running pass or sends messages, which a compiler does not trace.

    It would keep the cut of one pass, and cannot follow messages. The compiler loads slowly, so it is kept out when a
    pass begins: whoever compiles has loaded it by then.

    Attributes:
        run: the function to call.
    """

    known: ClassVar[list[Eager[..., Any]]] = []

    def __init__(self, function: Callable[P, T]) -> None:
        self.run = self._plain = function
        Eager.known.append(self)

    @classmethod
    def shield(cls) -> None:
        """Keep the compiler out of all of them, if there is one. Local."""
        if "torch._dynamo" in sys.modules:
            for each in cls.known:
                if each.run is each._plain:
                    each.run = torch.compiler.disable(each._plain)


def set_running(running: Running | None) -> None:
    """Begin a pass that is cut so; None: nothing is cut any more. Local."""
    Eager.shield()
    state = _state()
    state.forward = running
    if _task() == -1:
        state.told.clear()
        if running is not None and torch.is_grad_enabled():
            state.waiting = [*(other for other in state.waiting if other is not running), running][-_REMEMBERED:]


def leave(group: SequenceGroup) -> None:
    """Nothing is cut any more, if the running pass is of `group`; passes of other engines go on. Local."""
    found = _state().forward
    if found is not None and found.group is group:
        set_running(None)


@contextmanager
def use(running: Running | None) -> Iterator[None]:
    """Context of a pass that is cut so. Local."""
    before = _state().forward
    set_running(running)
    try:
        yield
    finally:
        _state().forward = before


def mark(outputs: Any) -> None:
    """Note the running pass at its outputs, tensors in lists, tuples and dicts, so that backward knows it. Local."""
    running = _state().forward
    if running is None or not torch.is_grad_enabled():
        return
    for tensor in tensors(outputs):
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda _: tell(running))


def tell(running: Running) -> None:
    """Say from within backward which pass it belongs to. Local."""
    state = _state()
    state.told[_task()] = running
    state.waiting = [other for other in state.waiting if other is not running]
