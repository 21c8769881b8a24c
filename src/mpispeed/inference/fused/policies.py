"""Policies: which layers of a model are fused, and where their parts are.

A policy is a class; `fuse` of an instance makes the fused forward of a layer. For a layer class of one's own, derive
from the policy whose layer it resembles, and give it as `injection_policy={MyLayer: MyPolicy}`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.inference.fused.layers import FusedLayer, Names
from mpispeed.inference.fused.parts import Attention, Call, Mlp, Norm
from mpispeed.nn.tensor.shard_plan import child


class TransformerPolicy:
    """Base of policies: a layer with norms before attention and MLP, separate q, k and v, and no rotary embedding.

    Attributes:
        layer_names: names of the layer's classes; base classes count.
        is_causal: a token sees no later ones.
        attention: path of the attention in the layer; likewise the others, "" for none.
        inputs: paths in the attention, to queries, keys and values, or to all at once.
        output: path in the layer.
        gate: path in the layer.
        up: path in the layer.
        down: path in the layer.
        activation: path in the layer of the function between.
        norms: paths in the layer, in front of attention and MLP, or behind them.
        place: attribute of the attention: the layer's place in the cache.
        names: of the layer's arguments.
        form: see `FusedLayer`.
        returns_tuple: see `FusedLayer`.
    """

    layer_names: ClassVar[tuple[str, ...]] = ()
    is_causal: ClassVar[bool] = True
    attention: ClassVar[str] = "self_attn"
    inputs: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    output: ClassVar[str] = "self_attn.o_proj"
    gate: ClassVar[str] = ""
    up: ClassVar[str] = "mlp.c_fc"
    down: ClassVar[str] = "mlp.c_proj"
    activation: ClassVar[str] = "mlp.act"
    norms: ClassVar[tuple[str, ...]] = ("ln_1", "ln_2")
    place: ClassVar[str] = "layer_idx"
    names: ClassVar[Names] = Names()
    form: ClassVar[str] = "before"
    returns_tuple: ClassVar[bool] = False

    @classmethod
    def knows(cls, layer: nn.Module) -> bool:
        """True if the layer is of this policy, and has its parts."""
        is_named = any(base.__name__ in cls.layer_names for base in type(layer).__mro__)
        return is_named and not list(cls.missing(layer))

    @classmethod
    def missing(cls, layer: nn.Module) -> Iterator[str]:
        """Paths of parts that the layer does not have."""
        below = (f"{cls.attention}.{path}" for path in cls.inputs)
        for path in (cls.attention, *below, cls.output, cls.gate, cls.up, cls.down, *cls.norms):
            if path and child(layer, path) is None:
                yield path

    def fuse(self, layer: nn.Module) -> FusedLayer:
        """The fused forward of a layer.

        Raises:
            ConfigError: a part is missing.
        """
        missing = list(self.missing(layer))
        if missing:
            msg = f"{type(self).__name__}: a {type(layer).__name__} has no {', '.join(missing)}; derive a policy whose "
            msg += "paths are those of the layer"
            raise ConfigError(msg)
        norms = tuple(Norm(layer.get_submodule(path)) for path in self.norms)
        fused = FusedLayer(layer, self.attention_of(layer), self.mlp_of(layer), norms, self.names, self.form_of(layer))
        fused.returns_tuple = self.returns_tuple
        return fused

    def attention_of(self, layer: nn.Module) -> Attention:
        """The attention of a layer."""
        module: Any = layer.get_submodule(self.attention)
        inputs = tuple(module.get_submodule(path) for path in self.inputs)
        output, place = layer.get_submodule(self.output), getattr(module, self.place) or 0
        return Attention(module, inputs, output, self.size_of(module), self.scale_of(module), place)

    def size_of(self, module: Any) -> int:
        """Width of a head of an attention."""
        size: int = module.head_dim
        return size

    def scale_of(self, module: Any) -> float:
        """Factor of the products of queries and keys."""
        scale: float = module.scaling
        return scale

    def mlp_of(self, layer: nn.Module) -> Mlp:
        """The MLP of a layer."""
        holder, _, name = self.activation.rpartition(".")
        activation = getattr(layer.get_submodule(holder), name)
        gate = layer.get_submodule(self.gate) if self.gate else None
        return Mlp(layer.get_submodule(self.up), layer.get_submodule(self.down), activation, gate)

    def form_of(self, layer: nn.Module) -> str:
        """The form of a layer."""
        return self.form


class HFGPT2LayerPolicy(TransformerPolicy):
    """transformers' GPT-2."""

    layer_names = ("GPT2Block",)
    attention = "attn"
    inputs = ("c_attn",)
    output = "attn.c_proj"

    @classmethod
    def knows(cls, layer: nn.Module) -> bool:
        """Not one that upcasts attention in an order of its own."""
        return super().knows(layer) and not getattr(child(layer, cls.attention), "reorder_and_upcast_attn", False)


class HFOPTLayerPolicy(TransformerPolicy):
    """transformers' OPT, of which some sizes have the norms behind."""

    layer_names = ("OPTDecoderLayer",)
    output = "self_attn.out_proj"
    up, down, activation = "fc1", "fc2", "activation_fn"
    norms = ("self_attn_layer_norm", "final_layer_norm")

    def form_of(self, layer: nn.Module) -> str:
        """As the layer's option says."""
        return "before" if getattr(layer, "do_layer_norm_before", True) else "behind"


class LLAMALayerPolicy(TransformerPolicy):
    """transformers' LLaMA, Mistral and Qwen2, with grouped queries."""

    layer_names = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
    gate, up, down, activation = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.act_fn"
    norms = ("input_layernorm", "post_attention_layernorm")
    names = Names(needed=("position_embeddings",))

    def fuse(self, layer: nn.Module) -> FusedLayer:
        """With the rotary tables of the model."""
        fused = super().fuse(layer)
        fused.tables = _tables_of_model
        return fused


def _tables_of_model(given: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
    cosine, sine = given["position_embeddings"]
    return cosine, sine


class HFBertLayerPolicy(TransformerPolicy):
    """transformers' BERT and RoBERTa, without cross attention."""

    layer_names = ("BertLayer", "RobertaLayer", "XLMRobertaLayer")
    is_causal = False
    attention = "attention.self"
    inputs = ("query", "key", "value")
    output = "attention.output.dense"
    up, down, activation = "intermediate.dense", "output.dense", "intermediate.intermediate_act_fn"
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    form = "behind"

    def size_of(self, module: Any) -> int:
        """BERT has a name of its own."""
        size: int = module.attention_head_size
        return size


class _Positions:
    """Rotary tables by positions out of a table of the model, made once for all layers of a pass."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None
        self._made: tuple[Tensor, Tensor] | None = None

    def tables(self, module: Any, given: dict[str, Any], x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for a call. Shapes: [batch or 1, tokens, width]."""
        made, positions = self._made, given["position_ids"]
        if made is None or self._positions is not positions or made[0].dtype != x.dtype:
            rows = module.embed_positions.to(positions.device)[positions].to(x.dtype)
            sine, cosine = rows.chunk(2, dim=-1)
            made = self._made = (cosine.contiguous(), sine.contiguous())
            self._positions = positions
        return made


class HFGPTJLayerPolicy(TransformerPolicy):
    """transformers' GPT-J: attention and MLP side by side, with one sum over ranks."""

    layer_names = ("GPTJBlock",)
    attention = "attn"
    output = "attn.out_proj"
    up, down = "mlp.fc_in", "mlp.fc_out"
    norms = ("ln_1",)
    names = Names(cache="layer_past", needed=("position_ids",))
    form = "parallel"
    returns_tuple = True

    def __init__(self) -> None:
        self._positions = _Positions()

    def fuse(self, layer: nn.Module) -> FusedLayer:
        """With tables by positions."""
        fused = super().fuse(layer)
        module: Any = fused.attention.module
        fused.tables = functools.partial(self._positions.tables, module)
        fused.attention.is_halved = False
        fused.attention.function = _own_attention
        return fused

    def scale_of(self, module: Any) -> float:
        """GPT-J divides."""
        return 1.0 / float(module.scale_attn)


class HFGPTNEOLayerPolicy(TransformerPolicy):
    """transformers' GPT-Neo, of which some layers see a window only."""

    layer_names = ("GPTNeoBlock",)
    attention = "attn.attention"
    output = "attn.attention.out_proj"
    place = "layer_id"
    names = Names(cache="layer_past")
    returns_tuple = True

    def fuse(self, layer: nn.Module) -> FusedLayer:
        """With the window."""
        fused = super().fuse(layer)
        module: Any = fused.attention.module
        fused.attention.window = module.config.window_size if module.attention_type == "local" else 0
        fused.attention.function = _own_attention
        return fused

    def scale_of(self, module: Any) -> float:
        """GPT-Neo does not scale."""
        return 1.0


class BLOOMLayerPolicy(TransformerPolicy):
    """transformers' BLOOM, with ALiBi."""

    layer_names = ("BloomBlock",)
    attention = "self_attention"
    inputs = ("query_key_value",)
    output = "self_attention.dense"
    up, down, activation = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", "mlp.gelu_impl"
    norms = ("input_layernorm", "post_attention_layernorm")
    names = Names(cache="layer_past", needed=("alibi",))
    returns_tuple = True

    @classmethod
    def knows(cls, layer: Any) -> bool:
        """Not one that sums in an order of its own, or adds what is behind a norm."""
        options = ("apply_residual_connection_post_layernorm", "slow_but_exact")
        holders = (layer, getattr(layer, cls.attention, None))
        return super().knows(layer) and not any(getattr(h, name, False) for h in holders for name in options)

    def fuse(self, layer: nn.Module) -> FusedLayer:
        """With q, k and v of each head beside each other."""
        fused = super().fuse(layer)
        fused.attention.layout = "heads"
        fused.attention.function = _alibi_attention
        return fused

    def scale_of(self, module: Any) -> float:
        """BLOOM has a name of its own."""
        scale: float = module.inv_norm_factor
        return scale


def _alibi_attention(module: Any, q: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
    """Attention with ALiBi. Shapes: the result is [batch, tokens, heads, size]."""
    if call.alibi is None:
        msg = "attention with ALiBi was called without it"
        raise UsageError(msg)
    added, mask = call.alibi.view(q.shape[0], q.shape[1], 1, -1), call.mask
    if mask is not None:
        seen = mask[..., : keys.shape[2]]
        added = torch.where(seen, added, torch.finfo(q.dtype).min) if seen.dtype == torch.bool else added + seen
    scale = module.inv_norm_factor
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=added.to(q.dtype), scale=scale)
    return out.transpose(1, 2)


def _own_attention(module: Any, q: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
    """The attention of GPT-J's and GPT-Neo's own modules. Shapes: the result is [batch, tokens, heads, size]."""
    out: Tensor = module._attn(q, keys, values, call.mask)[0]
    return out.transpose(1, 2)


POLICIES: tuple[type[TransformerPolicy], ...] = (
    HFBertLayerPolicy,
    HFGPT2LayerPolicy,
    HFGPTNEOLayerPolicy,
    HFGPTJLayerPolicy,
    HFOPTLayerPolicy,
    LLAMALayerPolicy,
    BLOOMLayerPolicy,
)
"""Policies that injection tries."""


Policies = Mapping[Any, type[TransformerPolicy]]
"""Layer class, or its name -> policy."""


def split_policies(given: Mapping[Any, Any] | None) -> tuple[dict[Any, Any] | None, dict[Any, Any] | None]:
    """An `injection_policy` as what tells how layers are sliced, and what tells how they are fused; None for nothing.

    Values of the second are classes.
    """
    fused = {key: value for key, value in (given or {}).items() if isinstance(value, type)}
    sliced = {key: value for key, value in (given or {}).items() if key not in fused}
    return sliced or None, fused or None
