"""Linear layers whose products of few rows run in the loop of `native.thin_product`, decoding above all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.base.instance_attributes import put_on
from mpispeed.base.split_grads import Splits, product
from mpispeed.native.thin_product import KINDS, fits, thin_linear

_CONV1D = "transformers.pytorch_utils"


@dataclass(slots=True)
class ThinForward:
    """The forward of a plain linear layer, or of transformers' Conv1D."""

    layer: Any
    is_transposed: bool

    def __call__(self, x: Tensor) -> Tensor:
        """As the layer's own."""
        weight, bias = self.layer.weight, self.layer.bias
        across = weight.t() if self.is_transposed else weight
        if fits(x, across, bias):
            return thin_linear(x, across, bias)
        result: Tensor = type(self.layer).forward(self.layer, x)
        return result


def thin_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, is_transposed: bool = False) -> Tensor:
    """As `base.split_grads.product`, for sliced layers."""
    across = weight.t() if is_transposed else weight
    return thin_linear(x, across, bias) if fits(x, across, bias) else product(x, weight, bias, is_transposed)


def use_thin_products(model: nn.Module) -> Callable[[], None]:
    """Let the linear layers of a model on the host use the loop; gives what ends that.

    Weights of transformers' Conv1D, [in, out], get the memory order of [out, in]: shapes and values stay. Layers of
    other classes, such as quantized ones, stay as they are, and so do layers with a forward of their own.
    """
    return put_on(_places(model))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Tensor]]]:
    for module in model.modules():
        place = _place(module)
        if place is not None and place[0] not in vars(module):
            name, replacement, is_transposed = place
            if is_transposed:
                _turn(module)
            yield module, name, replacement


def _place(module: Any) -> tuple[str, Callable[..., Tensor], bool] | None:
    """The attribute to replace, by what, and whether the weight is [in, out]; None: not this module."""
    weight = vars(module).get("_parameters", {}).get("weight")
    if weight is None or weight.dtype not in KINDS or weight.device.type != "cpu" or weight.dim() != 2:
        return None
    if isinstance(module, Splits):
        return "product", thin_product, getattr(module, "transposed", False)
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return "forward", ThinForward(module, is_transposed=False), False
    if type(module).__name__ == "Conv1D" and type(module).__module__ == _CONV1D:
        return "forward", ThinForward(module, is_transposed=True), True
    return None


def _turn(module: Any) -> None:
    weight = module.weight
    if not weight.t().is_contiguous():
        with torch.no_grad():
            weight.data = weight.data.t().contiguous().t()
