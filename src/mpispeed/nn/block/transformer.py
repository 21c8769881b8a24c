"""A transformer layer for training on the fused kernels, with the parameters and settings of DeepSpeed's.

Four matrix products, the attention, and between them one pass each over the activations: norm, bias with the split into
heads, bias with GELU, bias with dropout, residual and norm. On the host, and in fp64, the references of the kernels
compute the same.

Sources: Devlin et al., "BERT", arXiv 1810.04805; Xiong et al., "On Layer Normalization in the Transformer
Architecture", arXiv 2002.04745, for norms before and behind.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.native.attention import attention
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.native.gelu_linear import gelu_linear
from mpispeed.native.norm import layer_norm_beside
from mpispeed.native.rotary import split_qkv
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu
from mpispeed.nn.block import at_once
from mpispeed.nn.block.config import TransformerConfig

_MASK_DIMS = 4
_NAMES = (
    "norm_w", "norm_b", "attn_qkvw", "attn_qkvb", "attn_ow", "attn_ob", "attn_nw", "attn_nb", "inter_w", "inter_b",
    "output_w", "output_b",
)  # fmt: skip
_in_order = itemgetter(*_NAMES)
_LIST = ("q", "k", "v", "attn_o", "attn_n", "inter", "output", "norm")


class TransformerLayer(nn.Module):
    """Self-attention and MLP with their norms, residuals and dropouts.

    `layer_id` of the class counts the layers made so far; that of a layer is its number, which a deep copy shares.

    Shapes (H hidden, I intermediate):
        attn_qkvw [3H, H], attn_qkvb [3H]: rows of queries, keys, values.
        attn_ow [H, H], attn_ob [H]: output of the attention.
        attn_nw, attn_nb [H]: the norm behind the attention.
        inter_w [I, H], inter_b [I]: into the MLP.
        output_w [H, I], output_b [H]: out of it.
        norm_w, norm_b [H]: the norm of the input (pre) or of the output (post).
    """

    layer_id = 0

    def __init__(
        self,
        config: TransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        """Make the parameters.

        Args:
            config: sizes and options; it is copied.
            initial_weights: copied; in order q, k, v, attention output, attention norm, MLP in, MLP out, norm.
            initial_biases: in the same order; the biases of q, k and v start at zero in any case.

        Raises:
            ConfigError: a value is missing or does not fit, or an initial tensor has another shape.
        """
        super().__init__()
        config.check(draws_weights=initial_weights is None)
        self.config = copy.copy(config)
        self.layer_id = TransformerLayer.layer_id
        TransformerLayer.layer_id += 1
        if config.local_rank >= 0 and torch.cuda.is_available() and config.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(config.local_rank)
        hidden, inner = config.hidden_size, config.mlp_size
        self.attn_qkvw = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.attn_qkvb = nn.Parameter(torch.empty(3 * hidden))
        self.attn_ow = nn.Parameter(torch.empty(hidden, hidden))
        self.attn_ob = nn.Parameter(torch.empty(hidden))
        self.attn_nw = nn.Parameter(torch.empty(hidden))
        self.attn_nb = nn.Parameter(torch.empty(hidden))
        self.inter_w = nn.Parameter(torch.empty(inner, hidden))
        self.inter_b = nn.Parameter(torch.empty(inner))
        self.output_w = nn.Parameter(torch.empty(hidden, inner))
        self.output_b = nn.Parameter(torch.empty(hidden))
        self.norm_w = nn.Parameter(torch.empty(hidden))
        self.norm_b = nn.Parameter(torch.empty(hidden))
        self.reset_parameters(draws_weights=initial_weights is None)
        if initial_weights is not None:
            self._copy_weights(initial_weights)
        if initial_biases is not None:
            self._copy_biases(initial_biases)

    @torch.no_grad()
    def reset_parameters(self, *, draws_weights: bool = True) -> None:
        """Norms become 1, biases 0; weights are drawn, with the narrower deviation for the two outputs."""
        for bias in (self.attn_qkvb, self.attn_ob, self.attn_nb, self.inter_b, self.output_b, self.norm_b):
            bias.zero_()
        for weight in (self.attn_nw, self.norm_w):
            weight.fill_(1.0)
        if draws_weights:
            for weight in (self.attn_qkvw, self.inter_w):
                weight.normal_(0.0, self.config.initializer_range)
            for weight in (self.attn_ow, self.output_w):
                weight.normal_(0.0, self.config.output_range)

    def _copy_weights(self, given: Sequence[Tensor]) -> None:
        parts = _parts("initial_weights", given)
        hidden = self.config.hidden_size
        for name in ("q", "k", "v"):
            _check_shape("initial_weights", name, parts[name], (hidden, hidden))
        parts["attn_qkv"] = torch.cat([parts[name].detach() for name in ("q", "k", "v")])
        for name in ("attn_qkv", *_LIST[3:]):
            self._replace(
                f"{name}{'_w' if name in ('inter', 'output', 'norm') else 'w'}", parts[name], "initial_weights"
            )

    def _copy_biases(self, given: Sequence[Tensor]) -> None:
        parts = _parts("initial_biases", given)
        for name in _LIST[3:]:
            self._replace(
                f"{name}{'_b' if name in ('inter', 'output', 'norm') else 'b'}", parts[name], "initial_biases"
            )
        # Zeros, in the dtype and place of the others.
        self.attn_qkvb = nn.Parameter(parts["attn_o"].detach().new_zeros(self.attn_qkvb.shape))

    def _replace(self, name: str, value: Tensor, of: str) -> None:
        """Replace values, dtype and device of a parameter."""
        _check_shape(of, name, value, tuple(getattr(self, name).shape))
        setattr(self, name, nn.Parameter(value.detach().clone()))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: list[Any] | None = None,
        *,
        residual_scale: float = 1.0,
    ) -> Tensor | tuple[Tensor]:
        """The layer's output. Any batch and any sequence length will do; nothing is padded.

        Args:
            hidden_states: the input.
            attention_mask: added to the scores (0 or a large negative number; a bool one is True for positions that
                take part). It gets no gradient.
            head_mask: this and all following are parameters of other layers; only None and False are accepted.
            layer_head_mask: see there.
            encoder_hidden_states: see there.
            encoder_attention_mask: see there.
            past_key_value: see there.
            output_attentions: see there.
            grads: see there; gradients are in the parameters' `grad`.
            residual_scale: factor of what attention and MLP add to the residual stream, with their biases and
                dropouts; for stochastic depth.

        Shapes:
            hidden_states, result: [batch, sequence, hidden].
            attention_mask: [batch, 1, 1, sequence], or broadcastable to [batch, heads, sequence, sequence].

        Raises:
            UsageError: an argument that the layer does not support is given, or the input has another shape.
        """
        unsupported = (head_mask, layer_head_mask, encoder_hidden_states, encoder_attention_mask, past_key_value, grads)
        if any(given is not None for given in unsupported) or output_attentions:
            msg = (
                "a TransformerLayer takes hidden_states and attention_mask; head masks, encoder states, past keys, "
                "output_attentions and grads are not supported: leave them out"
            )
            raise UsageError(msg)
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.config.hidden_size:
            msg = (
                f"a TransformerLayer takes [batch, sequence, hidden_size = {self.config.hidden_size}], found "
                f"{tuple(hidden_states.shape)}"
            )
            raise UsageError(msg)
        mask = _checked_mask(attention_mask)
        out = None if torch.compiler.is_compiling() else self._at_once(hidden_states, mask, residual_scale)
        if out is None:
            composed = self._pre if self.config.pre_layer_norm else self._post
            out = composed(hidden_states, mask, residual_scale)
        return (out,) if self.config.return_tuple else out

    def without_branches(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor]:
        """What `forward` returns where stochastic depth leaves the layer out: its input."""
        return (hidden_states,) if self.config.return_tuple else hidden_states

    def _at_once(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
        """The output by kernels without faces between; None where they do not take the tensors as they are."""
        config = self.config
        try:
            named = _in_order(self._parameters)  # not by getattr of a module, which takes longer than a launch
        except KeyError:  # a parametrization computes one
            named = tuple(getattr(self, name) for name in _NAMES)
        front, behind, norm = named[:4], named[4:], named[:2]
        ratio = max(config.hidden_dropout_ratio, 0.0) if self.training else 0.0
        passes = at_once.passes_for(
            x, named, config.mlp_size, config.heads, ratio, config.layer_norm_eps, config.pre_layer_norm,
            not config.gelu_checkpoint,
        )  # fmt: skip
        if passes is None:
            return None
        attn_ratio = max(config.attn_dropout_ratio, 0.0) if self.training else 0.0
        if self._takes_sdpa(x, attn_ratio):
            *around, q, k, v = at_once.before(x, *front, passes)
            context = self._fused(q, k, v, mask, attn_ratio)
        else:
            got = at_once.before(x, *front[:3], None, passes)
            *around, qkv = got if config.pre_layer_norm else (got,)
            q, k, v = split_qkv(qkv, self.attn_qkvb, config.heads)
            context = attention(q, k, v, mask, ratio=attn_ratio, keeps_dropped=not config.attn_dropout_checkpoint)
        out: Tensor = at_once.after(context, around[0] if around else x, *behind, *norm, passes, scale)
        return out

    def _pre(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        around, n = layer_norm_beside(x, self.norm_w, self.norm_b, self.config.layer_norm_eps)
        attended = _scaled(self._attention(n, mask), self.attn_ob, scale)
        a, f = self._add_and_norm(*attended, around, self.attn_nw, self.attn_nb)
        ratio = max(self.config.hidden_dropout_ratio, 0.0)
        return bias_dropout_residual(*_scaled(self._mlp(f), self.output_b, scale), a, ratio, training=self.training)

    def _post(self, x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        attended = _scaled(self._attention(x, mask), self.attn_ob, scale)
        _, f = self._add_and_norm(*attended, x, self.attn_nw, self.attn_nb)
        return self._add_and_norm(*_scaled(self._mlp(f), self.output_b, scale), f, self.norm_w, self.norm_b)[1]

    def _add_and_norm(
        self, x: Tensor, x_bias: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum residual + dropout(x + x_bias), and its norm."""
        ratio, eps = max(self.config.hidden_dropout_ratio, 0.0), self.config.layer_norm_eps
        return bias_dropout_layer_norm(x, x_bias, residual, weight, bias, ratio, eps, training=self.training)

    def _attention(self, n: Tensor, mask: Tensor | None) -> Tensor:
        """The attention of n, without the bias of its output."""
        ratio = max(self.config.attn_dropout_ratio, 0.0) if self.training else 0.0
        attend = self._attend_fused if self._takes_sdpa(n, ratio) else self._attend_explicitly
        return F.linear(attend(n, mask, ratio).transpose(1, 2).reshape(n.shape), self.attn_ow)

    def _takes_sdpa(self, x: Tensor, ratio: float) -> bool:
        if self.config.attention != "auto":
            return self.config.attention == "sdpa"
        # Without a fused kernel torch computes it in steps and keeps more of them.
        return x.dtype != torch.float64 if x.device.type == "cuda" else ratio == 0

    def _attend_fused(self, n: Tensor, mask: Tensor | None, ratio: float) -> Tensor:
        """Attention output of the heads, by torch. Shapes: [batch, heads, sequence, hidden / heads]."""
        heads = self.config.heads
        # Fused attention reads queries, keys and values where the product left them: no pass to split them.
        qkv = F.linear(n, self.attn_qkvw, self.attn_qkvb).unflatten(2, (3, heads, self.config.hidden_size // heads))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        return self._fused(q, k, v, mask, ratio)

    @staticmethod
    def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ratio: float) -> Tensor:
        if mask is not None and mask.dtype not in (torch.bool, q.dtype):
            # Kept finite: a row that is masked everywhere attends evenly, as with -10000.
            mask = mask.clamp(min=torch.finfo(q.dtype).min).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p=ratio)

    def _attend_explicitly(self, n: Tensor, mask: Tensor | None, ratio: float) -> Tensor:
        """As `_attend_fused`, with probabilities written out."""
        q, k, v = split_qkv(F.linear(n, self.attn_qkvw), self.attn_qkvb, self.config.heads)
        return attention(q, k, v, mask, ratio=ratio, keeps_dropped=not self.config.attn_dropout_checkpoint)

    def _mlp(self, f: Tensor) -> Tensor:
        """The MLP of f, without the bias of its output."""
        inner = F.linear(f, self.inter_w)
        if self.config.gelu_checkpoint:
            return gelu_linear(inner, self.inter_b, self.output_w)
        return F.linear(bias_gelu(inner, self.inter_b), self.output_w)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        config = self.config
        norm = "pre" if config.pre_layer_norm else "post"
        sizes = f"hidden_size={config.hidden_size}, heads={config.heads}, intermediate_size={config.mlp_size}"
        return f"{sizes}, {norm}_layer_norm, attention={config.attention}"


def _scaled(x: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output of a branch and its bias times `scale`."""
    return (x, bias) if scale == 1.0 else (x * scale, bias * scale)


def _parts(of: str, given: Sequence[Tensor]) -> dict[str, Tensor]:
    if len(given) != len(_LIST):
        msg = f"{of} has {len(given)} tensors; expected {len(_LIST)}: {', '.join(_LIST)}"
        raise ConfigError(msg)
    return dict(zip(_LIST, given, strict=True))


def _check_shape(of: str, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        msg = f"{of}: {name} has shape {tuple(value.shape)}; the config makes it {shape}"
        raise ConfigError(msg)


def _checked_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() != _MASK_DIMS:
        msg = (
            f"attention_mask has shape {tuple(mask.shape)}; expected [batch, 1, 1, sequence], added to the scores: "
            "for a mask of ones and zeros (1.0 - mask[:, None, None, :]) * -10000.0"
        )
        raise UsageError(msg)
    return mask.detach()
