"""Fused forwards of transformer layers. They are put in front of a layer's own, which runs where they do not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpispeed.inference.fused.parts import Attention, Call, Mlp, Norm, summed
from mpispeed.nn.tensor.apply import OwnHeads

ATTENTIONS = ("eager", "sdpa")
"""Attention of a model's config that a fused forward can take the place of."""

_HIDDEN_DIMS = 3


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a layer's arguments.

    Attributes:
        cache: of the cache.
        unknown: arguments that only the layer's own forward can do if they are given (or true).
        needed: arguments that the fused forward has to be given.
    """

    cache: str = "past_key_values"
    unknown: tuple[str, ...] = ("encoder_hidden_states", "output_attentions", "head_mask")
    needed: tuple[str, ...] = ()


Tables = Callable[[dict[str, Any], Tensor], tuple[Tensor, Tensor]]
"""Cosine and sine for the arguments of a call and the hidden states."""


@dataclass(slots=True)
class FusedLayer:
    """The forward of one layer.

    Attributes:
        layer: the layer whose forward this is.
        attention: its attention.
        mlp: its MLP.
        norms: in front of attention and MLP, or behind them; one for both in a parallel layer.
        names: of the layer's arguments.
        tables: gives rotary tables; None: there are none.
        returns_tuple: the model wants (hidden states, None).
        form: `before`, `behind` (the norms), or `parallel`.
    """

    layer: Any
    attention: Attention
    mlp: Mlp
    norms: tuple[Norm, ...]
    names: Names
    form: str = "before"
    tables: Tables | None = None
    returns_tuple: bool = False
    _order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._order = tuple(inspect.signature(type(self.layer).forward).parameters)[2:]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's own forward. Collective over: the group that slices the layer."""
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        if not self._fits(hidden_states, given):
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        for hook in self.attention.module._forward_pre_hooks.values():
            given = hook(self.attention.module, (), given)[1]
        call = Call(
            given.get("attention_mask"),
            given.get(self.names.cache),
            None if self.tables is None else self.tables(given, hidden_states),
            given.get("alibi"),
        )
        out = getattr(self, f"_{self.form}")(hidden_states, call)
        return (out, None) if self.returns_tuple else out

    def _fits(self, x: Tensor, given: dict[str, Any]) -> bool:
        weight, names = self.norms[0].module.weight, self.names
        if self.layer.training or torch.compiler.is_compiling() or x.dim() != _HIDDEN_DIMS or not x.numel():
            return False
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            return False
        if torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype:
            return False
        is_asked_more = any(given.get(name) is not None and given[name] is not False for name in names.unknown)
        if is_asked_more or any(given.get(name) is None for name in names.needed):
            return False
        return self._is_attention_plain() and not hasattr(given.get(names.cache), "self_attention_cache")

    def _is_attention_plain(self) -> bool:
        module = self.attention.module
        name, is_shown = _options_of(module)
        is_known = name in ATTENTIONS and not is_shown and not module._forward_hooks
        return is_known and all(type(hook) is OwnHeads for hook in module._forward_pre_hooks.values())

    def _before(self, x: Tensor, call: Call) -> Tensor:
        normed = self.norms[0](x)[1]
        total, normed = self.norms[1](self.attention(normed, call), x)
        return total + self.mlp(normed)

    def _behind(self, x: Tensor, call: Call) -> Tensor:
        middle = self.norms[0](self.attention(x, call), x)[1]
        return self.norms[1](self.mlp(middle), middle)[1]

    def _parallel(self, x: Tensor, call: Call) -> Tensor:
        normed = self.norms[0](x)[1]
        inner = self.attention.inner(normed, call)
        return x + summed(self.attention.output, inner, self.mlp.down, self.mlp.inner(normed))


def _options_of(module: Any) -> tuple[Any, Any]:
    """The name of the attention in the module's config, and whether its weights are asked for in every call.

    Out of the config's own dict where they are there: an attribute of a config of transformers costs microseconds.
    A module without a config has one way only.
    """
    config = getattr(module, "config", None)
    kept = {} if config is None else vars(config)
    if "_attn_implementation_internal" in kept and "_output_attentions" in kept:
        return kept["_attn_implementation_internal"], kept["_output_attentions"]
    return getattr(config, "_attn_implementation", "eager"), getattr(config, "output_attentions", False)
