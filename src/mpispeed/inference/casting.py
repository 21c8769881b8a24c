"""The format of a model that answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

_KEPT = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
"""Format -> attributes of transformers' models that name modules which stay in fp32 beside it."""


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters and saved buffers in place, as transformers' `from_pretrained(dtype=...)` does.

    Buffers that no checkpoint has, as the frequencies of rotary embeddings, keep their precision; so do modules that
    the model names. The tensor objects stay the same, so tied parameters stay tied.
    """
    kept = {name for attribute in _KEPT.get(dtype, ()) for name in getattr(model, attribute, None) or ()}
    saved = set(model.state_dict(keep_vars=True))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_floating_point() or (name not in saved and not isinstance(tensor, torch.nn.Parameter)):
            continue
        wanted = torch.float32 if kept.intersection(name.split(".")) else dtype
        if tensor.dtype != wanted:
            tensor.grad = None
            tensor.data = tensor.data.to(wanted)
