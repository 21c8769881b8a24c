"""Wrappers of kernels: functions of autograd in eager mode, operators of torch for all that looks into a program.

A wrapper has a forward part, mostly a backward one, and a public function that checks its arguments and calls the
first. Both have a `run`, which asks `launcher.for_tensor(x)` and launches kernels or computes the reference, and a
`fake`, which makes empty outputs of the same shapes, strides and dtypes:

    _backward = ops.define("twice_backward(Tensor grad) -> Tensor", _run_backward, _fake_backward)
    _twice = ops.define("twice(Tensor x) -> Tensor", _run, _fake, autocast=("x",))
    ops.differentiate(_twice, _save, lambda ctx, grad: _backward(grad))

`_twice(x)` calls `run` itself, within an `autograd.Function` where a gradient is wanted. While something compiles, and
for fake tensors, subclasses, dispatch modes and function transforms, it calls the operator `torch.ops.mpispeed.twice`,
which has the same `run` behind torch's dispatcher: that costs three times as much.

Rules for a `run`: outputs are new, contiguous tensors, none of them an input or a view of one; inputs come with any
strides, so it calls `.contiguous()`; unwanted outputs are `x.new_empty(0)`, because an operator cannot return None.
`_save(ctx, inputs, output)` saves the tensors of backward by `ctx.save_for_backward`. Unused gradients arrive as None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from mpispeed.base.errors import UsageError
from mpispeed.native.cuda.compiled import is_built, launch

NAMESPACE = "mpispeed"
_AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_PLAIN = frozenset((Tensor, nn.Parameter))
_route = launch.route if is_built else None
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def is_eager(*tensors: Tensor | None) -> bool:
    """True if kernels may be launched on these at once: nothing compiles, traces, fakes or transforms the call."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(x is None or (type(x) in _PLAIN and not x.is_meta) for x in tensors)


class Operator:
    """Made by `define`; called with the arguments of its schema."""

    def __init__(
        self, op: OpOverload, run: Callable[..., Any], autocast: tuple[str, ...], follow: tuple[str, ...]
    ) -> None:
        """`op` and `run` compute the same."""
        self.op, self.run = op, run
        self.apply: Callable[..., Any] | None = None
        arguments = op._schema.arguments
        names = [argument.name for argument in arguments]
        self._tensors = tuple(at for at, argument in enumerate(arguments) if "Tensor" in str(argument.type))
        self._leaders = [names.index(name) for name in autocast]
        self._others = self._leaders + [names.index(name) for name in follow]

    def __call__(self, *args: Any) -> Any:
        """Compute it, and remember what backward needs where a gradient is wanted."""
        if _route is not None and not torch.compiler.is_compiling():
            way = _route(args, self._tensors)
            if way:
                return self.run(*args) if way == 1 or self.apply is None else self.apply(*args)
        tensors = [args[at] for at in self._tensors]
        if not is_eager(*tensors):
            return self.op(*args)
        if self._leaders and torch._C._is_any_autocast_enabled():
            kind = args[self._leaders[0]].device.type
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    args = tuple(self.in_one_dtype(args))
                    return self._compute(args, [args[at] for at in self._tensors])
        return self._compute(args, tensors)

    def _compute(self, args: tuple[Any, ...], tensors: list[Tensor | None]) -> Any:
        if self.apply is None or not torch.is_grad_enabled():
            return self.run(*args)
        if any(x is not None and x.requires_grad for x in tensors):
            return self.apply(*args)
        return self.run(*args)

    def in_one_dtype(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments as they come within `torch.autocast`."""
        return _in_one_dtype(list(args), self._leaders, self._others)


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    autocast: tuple[str, ...] = (),
    follow: tuple[str, ...] = (),
) -> Operator:
    """A wrapper, and the operator of namespace `mpispeed` beside it.

    Args:
        schema: as torch writes it, without namespace: "name(Tensor x, float eps) -> Tensor".
        run: computes it.
        fake: makes empty outputs, from tensors without data.
        autocast: within `torch.autocast` these arguments come in the widest of their dtypes; the operator computes in
            fp32 inside, so none has to be widened for its sake.
        follow: these arguments come in that dtype too, and have no say in it, as parameters.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    # Level 0 takes torch's own file for the one that registers. Ours would be looked up each time, which resolves the
    # paths of all modules loaded so far: two thousand requests to the file system per rank.
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library, _stacklevel=0)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    made = Operator(op, run, autocast, follow)
    if autocast:
        for device, key in _AUTOCAST_KEYS.items():
            _library.impl(name, _cast_first(made, device), key)
    return made


def differentiate(
    operator: Operator, save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> None:
    """Give `operator` its gradient: `save(ctx, inputs, output)` after forward, `backward(ctx, *grads)`.

    `backward` returns a gradient or None for each argument, alone or as a tuple. It is not differentiable again: where
    that would be asked of it, with `create_graph=True`, it raises UsageError.
    """
    name, run = operator.op.name(), operator.run

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    def once(ctx: Any, *grads: Tensor | None) -> Any:
        refuse_second_derivative(name, ctx, grads)
        return backward(ctx, *grads)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            ctx.set_materialize_grads(False)
            save(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            if torch.is_grad_enabled():
                refuse_second_derivative(name, ctx, grads)
            return backward(ctx, *grads)

    Function.__name__ = Function.__qualname__ = name.replace("::", "_")
    operator.apply = apply_of(Function)
    torch.library.register_autograd(name, once, setup_context=setup, lib=_library)


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for eager mode, without what torch does for function transforms and `vjp` on every call."""
    behind = getattr(function, "_backward_cls", None)
    if is_built and behind is not None:
        behind.apply = launch.bound(function.backward)  # what torch's engine calls; its own looks for the same
    made: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return made


def refuse_second_derivative(name: str, ctx: Any, grads: tuple[Tensor | None, ...]) -> None:
    """Check in a backward pass that no graph of it is wanted: it would begin at gradients or at what was saved.

    Raises:
        UsageError: it would.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*grads, *ctx.saved_tensors)):
        msg = f"{name} has no second derivative; call backward() without create_graph=True"
        raise UsageError(msg)


def check_one_dtype(name: str, x: Tensor, **others: Tensor | None) -> None:
    """Check that tensors are where `x` is and, outside of `torch.autocast`, of its dtype.

    Raises:
        ValueError: one is not; the message names it.
    """
    for what, other in others.items():
        if other is None or (other.dtype == x.dtype and other.device == x.device):
            continue
        if other.device == x.device and torch.is_autocast_enabled(x.device.type):
            continue
        msg = (
            f"{name}: {what} is {other.dtype} on {other.device} and x is {x.dtype} on {x.device}; convert one of them, "
            "or call it within torch.autocast"
        )
        raise ValueError(msg)


def _cast_first(operator: Operator, device: str) -> Callable[..., Any]:
    def cast(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return operator.op(*operator.in_one_dtype(args))

    return cast


def _in_one_dtype(args: list[Any], leaders: list[int], others: list[int]) -> list[Any]:
    wanted: torch.dtype | None = None
    for at in leaders:
        x = args[at] if at < len(args) else None
        if isinstance(x, Tensor) and x.is_floating_point():
            wanted = x.dtype if wanted is None else torch.promote_types(wanted, x.dtype)
    for at in others if wanted is not None else ():
        if at < len(args) and isinstance(args[at], Tensor) and args[at].is_floating_point():
            args[at] = args[at].to(wanted)
    return args
