"""Floating-point operations of a model by module: of forward passes, of backward, and of what backward repeats.

A forward pass is attributed by hooks that see every module begin and end. In backward an operator belongs to the node
of the graph that runs, and nodes have numbers in the order in which they were made: what module was running then is a
look-up. So no tensor gets a hook, and modules whose inputs need no gradient are right too.

Recomputation is any forward work that backward starts: by our checkpointing, by both kinds of torch's, by others that
switch gradients on for it.
"""

from __future__ import annotations

import importlib
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from mpispeed.base import split_grads
from mpispeed.base.errors import UsageError
from mpispeed.flops import functions
from mpispeed.flops.counter import FunctionMode, Modes, OperatorMode
from mpispeed.flops.formulas import name_of

_MOST_KEPT = 1 << 20
"""Borders of modules that are remembered for backward passes to come."""

OUTSIDE = -1
"""What torch gives as number of the backward pass where there is none."""


@dataclass(slots=True)
class Counts:
    """Operations and seconds of one module, or of a part of a model, on this rank.

    Attributes:
        forward: operations of forward passes.
        backward: operations of backward passes, without recomputation.
        recompute: operations of forward work that backward repeated.
        deepspeed_flops: operations of forward passes as DeepSpeed counts them.
        deepspeed_macs: multiply-accumulates, likewise.
        seconds: of forward passes.
        backward_seconds: of backward passes, with recomputation.
        calls: forward passes of the module itself.
    """

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    deepspeed_flops: int = 0
    deepspeed_macs: int = 0
    seconds: float = 0.0
    backward_seconds: float = 0.0
    calls: int = 0

    def add(self, other: Counts) -> None:
        """Add all but the calls."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMMED = [field.name for field in fields(Counts) if field.name != "calls"]


@dataclass(slots=True)
class _Frame:
    """A module whose forward is running. `task` is the backward pass that it runs in."""

    module: nn.Module
    path: str
    counts: Counts
    task: int
    is_ignored: bool
    begin: float
    inner: float = 0.0  # seconds of modules inside


class ModuleCounter:
    """Counts the operations of a model between `start` and `stop`, on this rank.

    Not started, it has no mode, no hook and no attribute anywhere. Passes are those of the thread that started it, and
    of threads of autograd. Compiled models run as they were written meanwhile.

    Attributes:
        own: by path of every module, what ran in itself and not in modules inside of it; the model's path is "".
        unknown: operators without a formula that are not element-wise, by name, with the number of their calls.
    """

    def __init__(self, model: nn.Module, *, ignore: Collection[type[nn.Module]] = (), deepspeed: bool = True) -> None:
        """Count nothing yet.

        Args:
            model: the modules to count.
            ignore: kinds of modules that are left out, with all modules inside of them.
            deepspeed: count as DeepSpeed does too.
        """
        self.model = model
        self._ignored, self._has_deepspeed = frozenset(ignore), deepspeed
        self._hooks: list[Any] = []
        self._modes: Modes | None = None
        self._paths: dict[int, list[str]] = {}
        self._frames: list[_Frame] = []
        self._thread = threading.get_ident()
        self._backward = _Backward(_waiter(model))
        self.own: dict[str, Counts] = {}
        self.unknown: dict[str, int] = {}
        self._others = Counts()
        self.reset()

    @property
    def is_started(self) -> bool:
        """True between `start` and `stop`."""
        return self._modes is not None

    @property
    def outside(self) -> int:
        """Operations in no module of the model, forward and backward: of losses, of other models, of an update."""
        return self._others.forward + self._others.backward + self._others.recompute

    def reset(self) -> None:
        """Forget all that was counted."""
        self.own = {path: Counts() for path, _ in _walk(self.model)}
        self.unknown, self._others = {}, Counts()
        for frame in self._frames:
            frame.counts = Counts() if frame.is_ignored else self.own.setdefault(frame.path, Counts())
        self._backward.forget()

    def start(self) -> None:
        """Begin to count, in addition to what was counted before.

        Raises:
            UsageError: it counts already.
        """
        if self._modes is not None:
            msg = "this counter of operations was started already; stop it first, or use another one"
            raise UsageError(msg)
        importlib.import_module("torch._dynamo")  # takes seconds, and the first call of a mode would do it
        self._paths = {}
        for path, module in _walk(self.model):
            self._paths.setdefault(id(module), []).append(path)
            self.own.setdefault(path, Counts())
        self._frames.clear()
        self._thread = threading.get_ident()
        is_fake = any(type(param).__name__ == "FakeTensor" for param in self.model.parameters())
        modes: list[Any] = [OperatorMode(self._begin, self._count, counts_fake=is_fake)]
        if self._has_deepspeed:
            modes.append(FunctionMode(functions.TABLE, self._count_function))
        self._modes = Modes(modes)
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._backward.note_owner(self._others)
        self._modes.enter()

    def stop(self) -> None:
        """End counting; nothing happens if it was not started."""
        modes, self._modes = self._modes, None
        if modes is None:
            return
        modes.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._frames.clear()
        self._paths.clear()
        self._backward.end()
        self._backward.note_owner(self._others)

    def total(self, path: str = "") -> Counts:
        """What ran in a module and in all modules inside of it; `calls` are those of the module itself.

        A module that is part of several others is counted in the one that called it.

        Raises:
            UsageError: the model has no module of this path.
        """
        if path not in self.own:
            msg = f"the model has no module {path!r}; paths are those of model.named_modules()"
            raise UsageError(msg)
        found = Counts(calls=self.own[path].calls)
        for name, counts in self.own.items():
            if not path or name == path or name.startswith(path + "."):
                found.add(counts)
        return found

    def begin_pass(self) -> None:
        """Count what runs from now on as the model's own: layers, and functions between them, without a call of it."""
        self._enter(self.model, None)

    def end_pass(self) -> None:
        """End what `begin_pass` began."""
        self._leave(self.model, None, None)

    # -- modules -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, _: Any) -> None:
        paths = self._paths.get(id(module))
        task = torch._C._current_graph_task_id()
        if paths is None or (task == OUTSIDE and threading.get_ident() != self._thread):
            return
        outer = self._frames[-1] if self._frames else None
        if outer is not None and module is self.model and task == OUTSIDE:
            self._frames.clear()  # of a pass that was interrupted
            outer = None
        path = paths[0] if len(paths) == 1 else _called_in(outer.path if outer else "", paths)
        is_ignored = (outer is not None and outer.is_ignored) or type(module) in self._ignored
        counts = Counts() if is_ignored else self.own[path]
        if task == OUTSIDE:
            self._backward.end()
            counts.calls += 1
        self._frames.append(_Frame(module, path, counts, task, is_ignored, self._backward.now()))
        self._backward.note_owner(counts)

    def _leave(self, module: nn.Module, _: Any, __: Any) -> None:
        if not self._frames or self._frames[-1].module is not module:
            return
        if self._frames[-1].task == OUTSIDE and threading.get_ident() != self._thread:
            return
        frame = self._frames.pop()
        outer = self._frames[-1] if self._frames else None
        if frame.task == OUTSIDE and not frame.is_ignored:
            seconds = self._backward.now() - frame.begin
            frame.counts.seconds += seconds - frame.inner
            if outer is not None:
                outer.inner += seconds
        self._backward.note_owner(outer.counts if outer else self._others)

    # -- calls -------------------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Counts, str]:
        """Whose the operator is that runs next, and what it is of."""
        task = torch._C._current_graph_task_id()
        if task != OUTSIDE:
            frame = self._frames[-1] if self._frames and self._frames[-1].task == task else None
            is_again = frame is not None or self._backward.is_recomputing(task)
            counts = frame.counts if frame is not None else self._backward.owner()
            counts = self.own[""] if counts is None else counts
            if is_again and frame is None:
                self._backward.note_owner(counts)
            self._backward.spend_on(counts)
            return counts, "recompute" if is_again else "backward"
        self._backward.end()
        if self._frames:
            return self._frames[-1].counts, "forward"
        self._backward.note_owner(self._others)
        postponed = split_grads.working_off()
        if postponed is None:
            return self._others, "forward"
        return self._backward.maker(postponed) or self.own[""], "backward"

    def _count(self, place: tuple[Counts, str], func: Any, operations: int | None, args: Any) -> None:
        counts, kind = place
        if operations is None:
            self._note_unknown(name_of(func), counts)
        else:
            setattr(counts, kind, getattr(counts, kind) + operations)
        if self._has_deepspeed and kind == "forward" and (formula := functions.OPERATORS.get(name_of(func))):
            self._count_function(formula, args, {}, None)

    def _note_unknown(self, name: str, counts: Counts) -> None:
        if counts is not self._others:
            self.unknown[name] = self.unknown.get(name, 0) + 1

    def _count_function(self, formula: functions.Formula, args: Any, kwargs: Any, _: Any) -> None:
        if not self._frames or torch._C._current_graph_task_id() != OUTSIDE:
            return
        counts = self._frames[-1].counts
        try:
            operations, macs = formula(*args, **kwargs)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            self._note_unknown(f"{formula.__name__.strip('_')} (as DeepSpeed counts)", counts)
            return
        counts.deepspeed_flops += operations
        counts.deepspeed_macs += macs


class _Backward:
    """Backward passes: owners of the nodes of their graphs, and the time that is spent on them."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        """`wait` waits for the device; None: there is none."""
        self._wait = wait
        self._starts: list[int] = []
        self._owners: list[Counts] = []
        self._makes_graph: dict[int, bool] = {}
        self._last: Counts | None = None
        self._since = 0.0

    def forget(self) -> None:
        """Drop all graphs and passes."""
        self._starts, self._owners = [], []
        self._makes_graph, self._last = {}, None

    def now(self) -> float:
        """Seconds, when the device has done what it was given."""
        if self._wait is not None:
            self._wait()
        return time.perf_counter()

    def note_owner(self, counts: Counts) -> None:
        """Whose the nodes are that are made from now on."""
        if self._owners and self._owners[-1] is counts:
            return
        number = torch._C._autograd._get_sequence_nr()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = counts
        elif not self._starts or self._starts[-1] < number:  # threads of a device have numbers of their own
            if len(self._starts) >= _MOST_KEPT:
                del self._starts[: _MOST_KEPT // 2], self._owners[: _MOST_KEPT // 2]
            self._starts.append(number)
            self._owners.append(counts)

    def owner(self) -> Counts | None:
        """Whose the node is that runs, if it was made since the start; for nodes of parameters the one before."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if self._starts and number > torch._C._autograd._get_sequence_nr():  # gradients are handed over
            return self._last
        return self.maker(number)

    def maker(self, number: int) -> Counts | None:
        """Whose the node of this number is."""
        if not self._starts or number < self._starts[0]:
            return None
        return self._owners[bisect_right(self._starts, number) - 1]

    def is_recomputing(self, task: int) -> bool:
        """True if forward work runs outside of all modules: gradients are on in a pass that makes no graph itself."""
        if not torch.is_grad_enabled():
            self._makes_graph.setdefault(task, False)
            return False
        makes_graph = self._makes_graph.get(task)
        if makes_graph is False:
            return True
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return True  # what it saves is kept by somebody who repeats a forward pass
        if makes_graph is None:
            if isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction):
                return True
            self._makes_graph[task] = True
        return False

    def spend_on(self, counts: Counts) -> None:
        """Time is spent on `counts` from now on."""
        if counts is self._last:
            return
        now = self.now()
        if self._last is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        else:
            self._last.backward_seconds += now - self._since
        self._last, self._since = counts, now

    def end(self) -> None:
        """End the pass, if there is one."""
        if self._last is not None:
            self._last.backward_seconds += self.now() - self._since
            self._last = None


def _walk(model: nn.Module, path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their paths; one that is part of several has several."""
    yield path, model
    for name, child in model._modules.items():
        if child is not None and id(child) not in above:
            yield from _walk(child, f"{path}.{name}" if path else name, (*above, id(model)))


def _called_in(caller: str, paths: list[str]) -> str:
    """The path of a shared module that has most in common with the path of the one that called it."""

    def common(path: str) -> int:
        pairs = zip(path.split("."), caller.split("."), strict=False)
        return next((number for number, (a, b) in enumerate(pairs) if a != b), 10**6) if caller else 0

    return max(paths, key=common)


def _waiter(model: nn.Module) -> Callable[[], None] | None:
    """What waits for the model's device; None on the host."""
    kinds = {param.device.type for param in model.parameters()} - {"cpu", "meta"}
    return torch.accelerator.synchronize if kinds else None
