"""Experts of `transformers`, which keep the weights of all experts in tensors [experts, outputs, inputs], with codes.

A module is changed in place, as the layers are: its hooks stay, such as those that sum the outputs of slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpispeed.inference.quantized.layers import Format, adopt, apply_to_coded, check_groups, codes_of
from mpispeed.native import weight_codes
from mpispeed.nn.tensor.tensor_cut import marks_of

_LAST = "down_proj"
_ORIGIN = "_whole_class"
_PLAIN = ("has_bias", "has_post_expert_norm", "_is_expert_parallel", "is_transposed")


def expert_tensors(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module whose experts can be quantized, the one that is used first; else ()."""
    marks = vars(module)
    first = "gate_up_proj" if marks.get("has_gate") else "up_proj"
    if "is_concatenated" not in marks or any(marks.get(name) for name in _PLAIN):
        return ()
    params = {name: param for name, param in module._parameters.items() if param is not None}
    is_fit = set(params) == {first, _LAST} and all(param.dim() == 3 for param in params.values())
    return (first, _LAST) if is_fit else ()


def expert_inputs(module: nn.Module, name: str) -> int:
    """Inputs of each expert's matrix, of the full one where it is sliced."""
    cut = marks_of(module).cuts.get(name)
    param: Any = module._parameters[name]
    return int(cut.shape[2] if cut is not None else param.shape[2])


class QuantizedExperts(nn.Module):
    """Experts with coded weights; each expert multiplies the rows of the tokens that chose it.

    Shapes: hidden_states [tokens, width], top_k_index and top_k_weights [tokens, choices]; result as hidden_states.
    """

    act_fn: Callable[[Tensor], Tensor]
    has_gate: bool

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum over the experts that a token chose, each times its weight."""
        first = codes_of(self, "gate_up_proj" if self.has_gate else "up_proj")
        last = codes_of(self, _LAST)
        experts = last.rows // hidden_states.shape[-1]
        wide, high = first.rows // experts, last.rows // experts
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            if expert >= experts:  # nobody's
                continue
            token, choice = torch.where(top_k_index == expert)
            x = weight_codes.linear(hidden_states[token], first.part(expert * wide, (expert + 1) * wide))
            x = self.__dict__[_ORIGIN]._apply_gate(self, x) if self.has_gate else self.act_fn(x)
            x = weight_codes.linear(x, last.part(expert * high, (expert + 1) * high))
            total.index_add_(0, token, (x * top_k_weights[token, choice, None]).to(total.dtype))
        return total

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return apply_to_coded(self, nn.Module, fn, recurse)


def quantize_experts(module: nn.Module, formats: dict[str, Format], path: str = "experts") -> None:
    """Code the weights of all experts of a module, in place.

    Args:
        module: `expert_tensors` has names for it.
        formats: name of each parameter -> how. Groups are along inputs.
        path: of the module, for errors.

    Raises:
        ConfigError: groups do not divide the inputs.
    """
    for name, how in formats.items():
        param: Any = module._parameters[name]
        check_groups(f"{path}.{name}", param.shape[2], how)
        rows = param.detach().reshape(-1, param.shape[2])
        coded = weight_codes.encode(rows, how.bits, how.group, is_symmetric=how.is_symmetric)
        adopt(module, name, coded, param)
    module.__dict__[_ORIGIN] = type(module)
    module.__class__ = QuantizedExperts
