"""Backward in two passes: gradients of inputs at once, gradients of weights later, in the order they were postponed.

Linear layers and convolutions are run here as autograd functions of their own, which compute both gradients with the
operations that torch uses, so that only the time changes. Other layers stay in the first pass.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mpispeed.base.instance_attributes import put_on

Deliver = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes a parameter and its gradient."""

NOBODY = -1

Compute = Callable[[], list[tuple[torch.Tensor, torch.Tensor]]]


class Backlog:
    """Postponed weight gradients, in order."""

    def __init__(self) -> None:
        self._todo: deque[tuple[Compute, int]] = deque()

    def __len__(self) -> int:
        return len(self._todo)

    def add(self, compute: Compute) -> None:
        """Postpone a computation that returns pairs of a parameter and its gradient."""
        node = torch._C._current_autograd_node()
        self._todo.append((compute, NOBODY if node is None else node._sequence_nr()))

    def work_off(self, deliver: Deliver) -> None:
        """Compute all of them and deliver the gradients."""
        global _working_off
        with torch.no_grad():
            while self._todo:
                compute, _working_off = self._todo.popleft()
                try:
                    found = compute()
                finally:
                    _working_off = None
                for param, grad in found:
                    deliver(param, grad)


# A plain global and no context variable: autograd runs backward functions of a device on threads of its own.
_collecting: Backlog | None = None
_working_off: int | None = None


def working_off() -> int | None:
    """The number of the node that postponed what a backlog computes now; None while none does.

    This is work of a backward pass outside of it. `NOBODY` is no node's number.
    """
    return _working_off


@contextmanager
def put_off(backlog: Backlog) -> Iterator[None]:
    """Let backward passes inside the block postpone weight gradients of split layers to `backlog`."""
    global _collecting
    outer, _collecting = _collecting, backlog
    try:
        yield
    finally:
        _collecting = outer


def _owed(ctx: Any, grads: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[Any, Any]:
    """The gradients of weight and bias; None for both if they are postponed."""
    weight, bias = ctx.weight, ctx.bias
    wanted = [param for param in (weight, bias) if param is not None and param.requires_grad]
    if not wanted:
        return None, None
    if _collecting is None or not all(param.is_leaf for param in wanted):
        of_weight, of_bias = grads()
        return of_weight if weight.requires_grad else None, of_bias

    def compute() -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = zip((weight, bias), grads(), strict=True)
        return [(param, grad) for param, grad in pairs if grad is not None and param.requires_grad]

    _collecting.add(compute)
    return None, None


class _Linear(torch.autograd.Function):
    """`F.linear`; of `is_transposed` weights [in, out] as transformers' Conv1D has them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, is_transposed: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.is_transposed = weight, bias, is_transposed
        return F.linear(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = outputs
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)  # as autocast had them, if it was on
        is_transposed, has_bias = ctx.is_transposed, ctx.bias is not None and ctx.bias.requires_grad
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = grad.matmul(weight.t() if is_transposed else weight)

        def grads() -> tuple[torch.Tensor, torch.Tensor | None]:
            rows, values = _rows(grad), _rows(x)
            of_weight = values.t().mm(rows) if is_transposed else rows.t().mm(values)
            return of_weight, rows.sum(0) if has_bias else None

        return of_input, *_owed(ctx, grads), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., n] as [rows, n], also where n is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


class _Convolution(torch.autograd.Function):
    """A convolution of one to three dims without padding modes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, settings: tuple[Any, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.settings = weight, bias, settings
        return torch.convolution(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = outputs
        x, weight = ctx.saved_tensors
        sizes, has_bias = [weight.shape[0]], ctx.bias is not None and ctx.bias.requires_grad

        def run(mask: list[bool]) -> tuple[Any, Any, Any]:
            found = torch.ops.aten.convolution_backward(grad, x, weight, sizes, *ctx.settings, mask)
            return found[0], found[1], found[2]

        def grads() -> tuple[torch.Tensor, torch.Tensor | None]:
            _, of_weight, of_bias = run([False, True, has_bias])
            return of_weight, of_bias if has_bias else None

        of_input = run([True, False, False])[0] if ctx.needs_input_grad[0] else None
        return of_input, *_owed(ctx, grads), None


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_transposed: bool = False
) -> torch.Tensor:
    """`F.linear`; weights are [in, out] if `is_transposed`. `Splits` layers compute this until they are split."""
    return F.linear(x, weight.t() if is_transposed else weight, bias)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, is_transposed: bool = False
) -> torch.Tensor:
    """Linear layer whose weight gradient can be postponed. Shapes: x [..., in], weight [out, in], bias [out]."""
    result: torch.Tensor = _Linear.apply(x, weight, bias, is_transposed)  # type: ignore[no-untyped-call]
    return result


class Splits:
    """Base of layers with their own forward: they multiply by `self.product`, which `split` replaces by `linear`."""

    product: Callable[..., torch.Tensor] = staticmethod(product)


def _linear_of(module: Any, x: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    return linear(x, module.weight, module.bias, is_transposed)


def _convolution_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):  # which knows `conv2d`, and not the operation below it
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    settings = (
        list(module.stride), list(module.padding), list(module.dilation), False, [0] * len(module.stride), module.groups
    )  # fmt: skip
    result: torch.Tensor = _Convolution.apply(x, module.weight, module.bias, settings)  # type: ignore[no-untyped-call]
    return result


def _replacement(module: nn.Module) -> tuple[str, Callable[..., torch.Tensor]] | None:
    """The attribute of `module` to replace, and by what; None for other kinds and for subclasses of torch's layers."""
    forward = type(module).forward
    if isinstance(module, Splits):
        return "product", linear
    if forward is nn.Linear.forward:
        return "forward", functools.partial(_linear_of, module, is_transposed=False)
    if forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            return "forward", functools.partial(_convolution_of, module)
        return None
    is_conv1d = type(module).__name__ == "Conv1D" and forward.__module__ == "transformers.pytorch_utils"
    return ("forward", functools.partial(_linear_of, module, is_transposed=True)) if is_conv1d else None


def split(model: nn.Module) -> Callable[[], None]:
    """Run linear layers and convolutions of `model` here from now on, and `Splits` layers; gives what ends that."""
    found = ((module, _replacement(module)) for module in model.modules())
    return put_on((module, *how) for module, how in found if how is not None)
