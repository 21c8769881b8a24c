"""Making the implementation known to transformers, and giving it to a model."""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.nn.sequence import running

NAME = "mpispeed"
"""`attn_implementation` of transformers."""

_PLACES = "position_ids"
_COUNTING = "create_position_ids_from_input_ids"
"""How transformers calls the function of models whose positions do not count padding."""

_supplied: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def register_with_transformers() -> None:
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

    register_with_transformers()
    outermost = _outermost(model, PreTrainedModel)
    for part in outermost:
        _check(part)
        part.set_attn_implementation(NAME)
        if part not in _supplied:
            _supplied.add(part)
            part.register_forward_pre_hook(_supply_positions, with_kwargs=True)
        for inner in part.modules():
            if isinstance(inner, PreTrainedModel) and inner.config._attn_implementation != NAME:
                msg = (
                    f"a {type(inner).__name__} of transformers does not take its attention from the interface and "
                    f"stays at {inner.config._attn_implementation!r}; a sequence cannot be cut over ranks with it"
                )
                raise ConfigError(msg)
    return len(outermost)


def padding_of(model: nn.Module) -> int | None:
    """The padding token of a model of transformers whose positions begin behind it and leave it out; else None.

    Source: transformers, `create_position_ids_from_input_ids` of RoBERTa.
    """
    counts = hasattr(sys.modules.get(type(model).__module__), _COUNTING) or any(
        hasattr(type(part), _COUNTING) for part in model.modules()
    )
    config: Any = model.config
    return getattr(config, "pad_token_id", None) if counts else None


def _supply_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions in the whole sequence, where nobody has given any: the model would count from 0 on each rank.

    Raises:
        UsageError: the model counts tokens of the whole sequence, which are not known here.
    """
    if kwargs.get(_PLACES) is not None:
        return None
    names = list(inspect.signature(module.forward).parameters)
    if _PLACES in names[: len(args)] and args[names.index(_PLACES)] is not None:
        return None
    places = _own_positions.run()
    inputs = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() > 1]
    if places is None or not inputs or inputs[0].shape[1] != places.shape[1]:
        return None  # not this rank's tokens: attention will say so
    if _PLACES not in names or padding_of(module) is not None:
        msg = (
            f"a {type(module).__name__} of transformers counts positions by itself, on each rank from 0, and the "
            f"sequence is cut over ranks: pass {_PLACES} of the whole sequence to it, or give the model itself to "
            "initialize, where the engine cuts batches"
        )
        raise UsageError(msg)
    return args, {**kwargs, _PLACES: places.to(inputs[0].device)}


@running.Eager
def _own_positions() -> torch.Tensor | None:
    """Positions of this rank's tokens, [1, tokens]; None where nothing is cut."""
    current = running.current()
    if current is None or current.layout.size == 1:
        return None
    return current.layout.positions(current.rank).unsqueeze(0)


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
