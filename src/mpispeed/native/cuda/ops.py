"""Wrappers of kernels as operators of torch: seen by autograd, fake tensors, `torch.compile` and autocast.

A wrapper has a forward operator, mostly a backward one, and a public function that checks its arguments and calls the
first. Both have a `run`, which asks `launcher.for_tensor(x)` and launches kernels or computes the reference, and a
`fake`, which makes empty outputs of the same shapes, strides and dtypes:

    _backward = ops.define("twice_backward(Tensor grad) -> Tensor", _run_backward, _fake_backward)
    _twice = ops.define("twice(Tensor x) -> Tensor", _run, _fake, autocast=("x",))
    ops.differentiate(_twice, _save, lambda ctx, grad: _backward(grad))

Rules for a `run`: outputs are new, contiguous tensors, none of them an input or a view of one; inputs come with any
strides, so it calls `.contiguous()`; unwanted outputs are `x.new_empty(0)`, because an operator cannot return None.
`_save(ctx, inputs, output)` saves the tensors of backward by `ctx.save_for_backward`. Unused gradients arrive as None.

Operators are defined through `Library` and not `custom_op`: a call costs 14 instead of 15 microseconds with
gradients, 8 instead of 10 without (torch 2.13; a bare `autograd.Function` costs 6, and `torch.compile` would look
into it).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from mpispeed.base.errors import UsageError

NAMESPACE = "mpispeed"
_AUTOCAST_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    autocast: tuple[str, ...] = (),
    follow: tuple[str, ...] = (),
) -> OpOverload:
    """An operator of namespace `mpispeed`.

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
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if autocast:
        for device, key in _AUTOCAST_KEYS.items():
            _library.impl(name, _cast_first(op, device, autocast, follow), key)
    return op


def differentiate(
    op: OpOverload, save: Callable[[Any, tuple[Any, ...], Any], None], backward: Callable[..., Any]
) -> None:
    """Give `op` its gradient: `save(ctx, inputs, output)` after forward, `backward(ctx, *grads)`.

    `backward` returns a gradient or None for each argument, alone or as a tuple. It is not differentiable again: where
    that would be asked of it, with `create_graph=True`, it raises UsageError.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    def once(ctx: Any, *grads: Tensor | None) -> Any:
        # The graph of a second derivative would begin at the gradients and at what was saved, as weights of a sum.
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*grads, *ctx.saved_tensors)):
            msg = f"{op.name()} has no second derivative; call backward() without create_graph=True"
            raise UsageError(msg)
        return backward(ctx, *grads)

    torch.library.register_autograd(op.name(), once, setup_context=setup, lib=_library)


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


def _cast_first(op: OpOverload, device: str, autocast: tuple[str, ...], follow: tuple[str, ...]) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]
    leaders = [names.index(name) for name in autocast]
    others = leaders + [names.index(name) for name in follow]

    def cast(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return op(*_in_one_dtype(list(args), leaders, others))

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
