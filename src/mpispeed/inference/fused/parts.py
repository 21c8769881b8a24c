"""Parts of a fused layer: norm, attention and MLP, made of the modules that a policy names.

Linear layers are called as the modules that they are, so sliced and quantized ones do what they do alone. The rest runs
in the loops of `native.host_layer` on the host, and in the landed kernels or torch's on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpispeed.native import host_layer
from mpispeed.native.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.linear import RowLinear

Layout = Literal["thirds", "heads"]
"""Of one projection to queries, keys and values: [all q | all k | all v], or [q | k | v] of each head."""

_ACTIVATIONS = {
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "BloomGelu": "gelu_tanh",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
}
"""Class of a model's activation -> its name in `native.host_layer`."""


@dataclass(slots=True)
class Call:
    """One call of a layer.

    Attributes:
        mask: the model's attention mask.
        cache: keys and values of earlier tokens, changed; None: none are kept.
        rotary: cosine and sine of the positions, [batch or 1, tokens, width]; None: the model has no such tables.
        alibi: ALiBi of the model, [batch * heads, 1, keys].
    """

    mask: Tensor | None
    cache: Any
    rotary: tuple[Tensor, Tensor] | None
    alibi: Tensor | None


class Norm:
    """A layer norm or RMS norm, with the residual sum in front of it.

    Args:
        module: has `weight` and, if it is a layer norm, `bias`.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.is_centered = isinstance(module, nn.LayerNorm)
        self.eps: float = module.eps if self.is_centered else module.variance_epsilon

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The sum x + residual, or x itself, and its norm."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        if x.is_cpu:
            return host_layer.add_norm(x, residual, weight, bias, self.eps, is_centered=self.is_centered)
        if self.is_centered:
            if residual is not None:
                return add_layer_norm(x, residual, weight, bias, self.eps)
            return x, layer_norm(x, weight, bias, self.eps)
        if residual is not None:
            return add_rms_norm(x, residual, weight, self.eps)
        return x, rms_norm(x, weight, self.eps)


def activation_of(module: Any) -> str | None:
    """The name of an activation in `native.host_layer`; None: there is no loop for it."""
    name = type(module).__name__
    if name == "GELU" and getattr(module, "approximate", "none") == "tanh":
        return "gelu_tanh"
    return _ACTIVATIONS.get(name)


class Mlp:
    """An MLP: down(f(up(x))), or down(f(gate(x)) * up(x)).

    Args:
        up: a linear layer.
        down: a linear layer.
        activation: the model's function.
        gate: a linear layer, or None.
    """

    def __init__(
        self, up: nn.Module, down: nn.Module, activation: Callable[[Tensor], Tensor], gate: nn.Module | None
    ) -> None:
        self.up, self.down, self.gate, self.activation = up, down, gate, activation
        self.name = activation_of(activation)

    def inner(self, x: Tensor) -> Tensor:
        """What the last layer takes."""
        up = self.up(x)
        first, other = (up, None) if self.gate is None else (self.gate(x), up)
        if self.name is not None and first.is_cpu and first.is_contiguous():
            return host_layer.gated(first, self.name, other, out=first)
        y = self.activation(first)
        return y if other is None else y * other

    def __call__(self, x: Tensor) -> Tensor:
        """The output, without a residual."""
        out: Tensor = self.down(self.inner(x))
        return out


@dataclass(slots=True)
class Attention:
    """Attention with a cache.

    Attributes:
        module: the model's, for its function of attention.
        inputs: linear layers to queries, keys and values; or one of all.
        output: the linear layer behind.
        size: of a head.
        scale: of the products of queries and keys.
        place: of the layer in the cache.
        layout: of one projection.
        is_halved: of rotary embedding: which elements are a pair, see `native.host_layer.rotate_`.
        window: tokens that a query sees, itself included, where the mask does not say so; 0: all.
        function: attention of several queries, of (module, q, k, v, call); None: the one that the model's config names.
    """

    module: Any
    inputs: tuple[nn.Module, ...]
    output: nn.Module
    size: int
    scale: float
    place: int
    layout: Layout = "thirds"
    is_halved: bool = True
    window: int = 0
    function: Callable[[Any, Tensor, Tensor, Tensor, Call], Tensor] | None = None
    _interfaces: Any = field(default=None, init=False)

    def inner(self, x: Tensor, call: Call) -> Tensor:
        """What the last layer takes. Shapes: x [batch, tokens, hidden]."""
        batch, tokens = x.shape[0], x.shape[1]
        q, k, v = self._projected(x)
        if call.rotary is not None:
            q, k = self._turned(q, k, call.rotary)
        keys, values = (t.view(batch, tokens, -1, self.size).transpose(1, 2) for t in (k, v))
        if call.cache is not None:
            keys, values = call.cache.update(keys, values, self.place)
        mask = call.mask
        if self.window and tokens == 1:
            keys, values = keys[:, :, -self.window :], values[:, :, -self.window :]
            mask = mask if mask is None else mask[..., -self.window :]
        if tokens == 1 and q.is_cpu and keys.dtype == q.dtype and host_layer.takes_mask(mask, keys):
            return self._one(q, keys, values, mask, call).view(batch, 1, -1)
        queries = q.view(batch, tokens, -1, self.size).transpose(1, 2)
        return self._several(queries, keys, values, mask, call).reshape(batch, tokens, -1)

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """The output, without a residual."""
        out: Tensor = self.output(self.inner(x, call))
        return out

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes: [batch, tokens, heads * size]; views of one tensor where there is one projection."""
        if len(self.inputs) > 1:
            q, k, v = (layer(x) for layer in self.inputs)
            return q, k, v
        qkv: Tensor = self.inputs[0](x)
        if self.layout == "thirds":
            q, k, v = qkv.chunk(3, dim=-1)
            return q, k, v
        by_head = qkv.view(*qkv.shape[:2], -1, 3, self.size)
        q, k, v = (by_head[..., part, :].flatten(2) for part in range(3))
        return q, k, v

    def _turned(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if not q.is_cpu:
            return self._turned_by_torch(q, k, tables)
        cosine, sine = (table.reshape(-1, table.shape[-1]) for table in tables)
        for x in (q, k):
            rows = x.view(-1, x.shape[-1]) if x.is_contiguous() else x.flatten(0, 1)
            host_layer.rotate_(rows, cosine, sine, self.size, is_halved=self.is_halved)
        return q, k

    def _turned_by_torch(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        cosine, sine = (table.reshape(-1, table.shape[-1]) for table in tables)
        turn = host_layer.rotate_reference
        first, second = (turn(x.flatten(0, 1), cosine, sine, self.size, is_halved=self.is_halved) for x in (q, k))
        return first.view(q.shape), second.view(k.shape)

    def _one(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        heads = q.reshape(q.shape[0], -1, self.size)
        slopes = None if call.alibi is None else slopes_of(call.alibi, heads.shape[0])
        return host_layer.attend(heads, keys, values, mask, self.scale, slopes=slopes)

    def _several(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, call: Call) -> Tensor:
        """Attention by the model's own function. Shapes: the result is [batch, tokens, heads, size]."""
        if self.function is not None:
            return self.function(self.module, q, keys, values, call)
        if self._interfaces is None:
            self._interfaces = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        home = sys.modules[type(self.module).__module__]
        eager = getattr(home, "eager_attention_forward", None)
        attend = self._interfaces.get_interface(self.module.config._attn_implementation, eager)
        out: Tensor = attend(self.module, q, keys, values, mask, dropout=0.0, scaling=self.scale)[0]
        return out


def slopes_of(alibi: Tensor, batch: int) -> Tensor:
    """The slope of each head: what two neighbouring keys differ by. Shapes: alibi [batch * heads, 1, keys].

    The place of the first key may be counted from anywhere, because a softmax does not see what all keys have.
    """
    last = alibi.view(batch, -1, alibi.shape[-1])[0].float()
    if last.shape[-1] == 1:
        return torch.zeros(last.shape[0])
    return (last[:, -1] - last[:, -2]).contiguous()


def summed(first: nn.Module, x: Tensor, second: nn.Module, y: Tensor) -> Tensor:
    """The sum first(x) + second(y); where both are sliced by inputs over one group, with one sum over its ranks.

    Collective over: the group.
    """
    if not (_is_row(first) and _is_row(second) and first.comm is second.comm):
        out: Tensor = first(x) + second(y)
        return out
    a: Any = first
    b: Any = second
    out = a.product(x, a.weight, None, a.transposed).add_(b.product(y, b.weight, None, b.transposed))
    out = regions.reduce_from(out, a.comm, is_own=True)
    for bias in (a.bias, b.bias):
        if bias is not None:
            out = out + bias
    return out


def _is_row(module: Any) -> bool:
    return type(module) is RowLinear and not module.input_is_whole and module.sequence is None
