"""Making the implementation known to transformers, and giving it to a model."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError

NAME = "mpispeed"
"""`attn_implementation` of transformers."""


def register() -> None:
    """Make `attn_implementation="mpispeed"` known to transformers, for `from_pretrained` and `set_attn_implementation`.

    Imports transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from mpispeed.nn.hf_attention.interface import attention_forward
    from mpispeed.nn.hf_attention.masks import mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model has modules of transformers; does not import it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and any(isinstance(module, library.PreTrainedModel) for module in model.modules())


def adopt(model: nn.Module) -> int:
    """Give all models of transformers in `model` this attention; returns how many there are.

    Raises:
        ConfigError: one of them cannot change its attention, or would compute it beside the interface.
    """
    if not is_of_transformers(model):
        return 0
    from transformers import PreTrainedModel

    register()
    outermost = _outermost(model, PreTrainedModel)
    for part in outermost:
        _check(part)
        part.set_attn_implementation(NAME)
        for inner in part.modules():
            if isinstance(inner, PreTrainedModel) and inner.config._attn_implementation != NAME:
                msg = (
                    f"a {type(inner).__name__} of transformers does not take its attention from the interface and "
                    f"stays at {inner.config._attn_implementation!r}; a sequence cannot be cut over ranks with it"
                )
                raise ConfigError(msg)
    return len(outermost)


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    if isinstance(model, kind):
        return [model]
    return [found for child in model.children() for found in _outermost(child, kind)]


def _check(model: Any) -> None:
    """Refuse layers that carry a state along the sequence: each rank would begin it anew."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    kinds = {kind for kind in getattr(config, "layer_types", None) or () if "linear" in kind or "recurrent" in kind}
    if kinds or config.model_type.startswith(("mamba", "rwkv", "recurrent")):
        found = ", ".join(sorted(kinds)) or config.model_type
        msg = f"a {type(model).__name__} has layers ({found}) with a state along the sequence, which ranks cannot cut"
        raise ConfigError(msg)
