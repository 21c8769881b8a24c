"""The two modes that see what a model computes, and how they leave again.

A dispatch mode sees every operator that runs, in backward too: on threads of autograd as well, which have the modes of
the thread that called it. A function mode sees the functions of torch that a program calls; none in backward.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch
from torch import overrides
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpispeed.flops import formulas

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class OperatorMode(TorchDispatchMode):
    """Tells of every operator that runs.

    Subclasses of tensors are let through: what they run is seen instead, for DTensor the products of this rank.
    """

    supports_higher_order_operators = True

    def __init__(
        self, begin: Callable[[], Any], seen: Callable[[Any, Any, int | None, Any], None], *, counts_fake: bool = False
    ) -> None:
        """Observe.

        Args:
            begin: is called before an operator runs; what it gives is handed to `seen`.
            seen: takes that, the operator, its operations (None: it has no formula), and its arguments.
            counts_fake: fake tensors are those of the model.
        """
        super().__init__()
        self._begin, self._seen, self._counts_fake = begin, seen, counts_fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and tell of it."""
        kwargs = kwargs or {}
        if types and any(map(_runs_others, types)) and not isinstance(func, HigherOrderOperator):
            return NotImplemented
        formula, is_free, is_composite = _known(func)
        if is_free is None:
            return NotImplemented
        if types and not self._counts_fake and any(kind.__name__ in _FAKES for kind in types):
            return func(*args, **kwargs)  # somebody, DTensor say, looks ahead
        if is_composite:  # reaches modes as it is only where autograd is off, in inference mode
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        place = self._begin()
        out = func(*args, **kwargs)
        if formula is not None:
            self._seen(place, func, _counted(formula, args, kwargs, out), args)
        elif not is_free:
            self._seen(place, func, None, args)
        elif func.namespace == "mpispeed":
            self._seen(place, func, 0, args)
        return out


_FAKES = ("FakeTensor", "FunctionalTensor")


@functools.cache
def _runs_others(kind: Any) -> bool:
    """True for subclasses of tensors that run operators on others; fake ones stand for the real ones."""
    has_own = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return has_own and kind.__name__ not in _FAKES


_QUESTIONS = frozenset(
    f"aten::{name}"
    for name in (
        "sym_is_contiguous", "is_contiguous", "is_strides_like_format", "is_non_overlapping_and_dense", "size",
        "sym_size", "stride", "sym_stride", "storage_offset", "sym_storage_offset", "numel", "sym_numel", "dim",
    )
) | {"prim::layout"}  # fmt: skip
"""What tensors without memory answer themselves."""


@functools.cache
def _known(func: Any) -> tuple[formulas.Formula | None, bool | None, bool]:
    """The formula of an operator, whether it needs none (None: it is a question), and whether it is made of others."""
    name = formulas.name_of(func)
    if name in _QUESTIONS:
        return None, None, False
    formula = formulas.formula_of(func)
    is_composite = (
        formula is None
        and isinstance(func, OpOverload)
        and not name.startswith("prim::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)
    )
    return formula, formula is None and formulas.is_free(func), is_composite


def _counted(formula: formulas.Formula, args: Any, kwargs: Any, out: Any) -> int | None:
    """Operations, or None for tensors whose shapes the formula cannot read, such as nested ones."""
    try:
        return formula(args, kwargs, out)
    except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
        return None


class FunctionMode(TorchFunctionMode):
    """Tells of the functions of torch that a program calls, by name or by an operator such as `@`."""

    def __init__(self, table: Mapping[Any, Any], seen: Callable[[Any, Any, Any, Any], None]) -> None:
        """Observe.

        Args:
            table: functions of interest.
            seen: takes the value of one in `table`, its arguments, keywords, and result.
        """
        super().__init__()
        self._table, self._seen = table, seen
        self._opened: dict[Any, Callable[..., Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function and tell of it."""
        kwargs = kwargs or {}
        known = self._table.get(func)
        if known is None:
            if func not in _MADE_OF_OTHERS:
                return func(*args, **kwargs)
            if func not in self._opened:
                self._opened[func] = _opened(func)
            with self:
                return self._opened[func](*args, **kwargs)
        is_operator = func in _ARITHMETIC and _is_operator(sys._getframe(1))
        out = func(*args, **kwargs)
        if not is_operator:
            self._seen(known, args, kwargs, out)
        return out


_ARITHMETIC = frozenset((torch.Tensor.add, torch.Tensor.mul))
"""What `+` and `*` call too, which DeepSpeed's profiler does not see."""

_MADE_OF_OTHERS = frozenset(
    (F.multi_head_attention_forward, F.local_response_norm, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
)  # fmt: skip
"""Functions written in Python that call functions which count."""


def _is_operator(frame: types.FrameType) -> bool:
    """True if a frame is at `a + b`, not at a call."""
    code, at = frame.f_code.co_code, frame.f_lasti
    return dis.opname[code[at]].startswith("BINARY_")


def _opened(func: types.FunctionType) -> Callable[..., Any]:
    """The same function without its own question for modes, which would end in a call of itself."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    known = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    made = types.FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


class Modes:
    """Modes that are switched on and off by two calls, wherever others are entered and left in between.

    Meanwhile nothing compiled runs: compiled graphs are no operators.
    """

    def __init__(self, modes: Sequence[TorchDispatchMode | TorchFunctionMode]) -> None:
        self._modes = tuple(modes)
        self._stance: Any = None

    def enter(self) -> None:
        """Switch all on."""
        # Loads torch._dynamo, which takes seconds; the first operator under a dispatch mode would do so, and be timed.
        self._stance = torch.compiler.set_stance("force_eager")
        for mode in self._modes:
            mode.__enter__()

    def leave(self) -> None:
        """Switch all off; those that were entered on top of them and are still on stay on."""
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None
        for mode in reversed(self._modes):
            if isinstance(mode, TorchFunctionMode):
                _leave(mode, overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode)
            else:
                _leave(mode, dispatch._get_current_dispatch_mode_stack, dispatch._pop_mode, dispatch._push_mode)


def _leave(mode: Any, stack: Callable[[], Any], pop: Callable[[], Any], push: Callable[[Any], Any]) -> None:
    above = []
    while stack() and stack()[-1] is not mode:
        above.append(pop())
    if stack():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)
