"""`sparse_attention`: attention layers of the model compute the blocks of the pattern that the config describes."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.nn.sparse import SparseAttentionUtils, SparseSelfAttention, sparsity_of
from mpispeed.nn.sparse.encoders import RESERVED, encoder_of
from mpispeed.nn.sparse.layouts import PATTERNS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.config.sparse import SparseAttention

log = logging.getLogger(__name__)

_KEY = "sparse_attention"


def transform(model: nn.Module, setup: Setup) -> None:
    """Give `SparseSelfAttention` layers without a pattern that of the config, and encoders of transformers such layers.

    Layers that the script has given a pattern keep it.

    Collective over: the pipe axis, if the section is there.

    Raises:
        ConfigError: the model has no such layer, or one that cannot attend so.
    """
    section = setup.plan.config.sparse_attention
    if section is None:
        return
    _require_servable(setup)
    values = section.model_dump()
    of_heads = partial(sparsity_of, values)
    of_heads(
        1 if not section.different_layout_per_head else section.num_different_global_patterns
    )  # says what is wrong
    if setup.mesh.rank == 0:
        _tell_unread(section)
    changed = _replace_encoders(model, of_heads)
    if changed and setup.mesh["sequence"].size > 1:
        msg = (
            f"{_KEY} replaces attention of transformers' encoders for whole sequences only; set sequence_parallel_size "
        )
        msg += f"to 1, not {setup.mesh['sequence'].size}"
        raise ConfigError(msg)
    for module in _sparse_layers(model).values():
        if module.is_default:
            module.adopt(of_heads)
            changed = True
    found = setup.mesh["pipe"].gather_objects(changed or bool(_sparse_layers(model)))
    if not any(found):
        msg = f"{_KEY} is in the config, and the model, a {type(model).__name__}, has nothing that it applies to: "
        msg += (
            "neither SparseSelfAttention layers nor a BERT or RoBERTa of transformers; use one, or remove the section"
        )
        raise ConfigError(msg)


def _require_servable(setup: Setup) -> None:
    """Refuse cuts under which no rank has a head and the whole sequence for it.

    Raises:
        ConfigError: there is one.
    """
    cuts = (
        ("sequence.ring", "sequence_parallel.ring_size", "whole sequences"),
        ("model", "tensor_parallel", "all heads"),
    )
    for axis, key, needed in cuts:
        if setup.mesh[axis].size > 1:
            msg = (
                f"{_KEY} needs {needed} of a layer on a rank, and {key} cuts them over {setup.mesh[axis].size}; use one"
            )
            raise ConfigError(msg)


def _tell_unread(section: SparseAttention) -> None:
    """Warn of keys that the mode does not read."""
    read = {"mode", "block", "different_layout_per_head", *PATTERNS[section.mode][1]}
    unread = sorted(section.model_fields_set - read)
    if unread:
        log.warning("%s.%s has no effect here: mode %s does not read it", _KEY, ", ".join(unread), section.mode)


def _replace_encoders(model: nn.Module, of_heads: partial[Any]) -> bool:
    """Replace the self-attention of encoders; one that has layers over blocks already is the script's."""
    changed = False
    for module in list(model.modules()):
        found = encoder_of(module)
        if found is None or _sparse_layers(module):
            continue
        kind, inner = found
        length = inner.embeddings.position_embeddings.num_embeddings - RESERVED[kind]
        try:
            SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
                module, length, of_heads(inner.config.num_attention_heads)
            )
        except ValueError as error:
            msg = f"{_KEY} does not fit to the model, a {type(module).__name__}: {error}"
            raise ConfigError(msg) from error
        changed = True
    return changed


def _sparse_layers(model: nn.Module) -> dict[str, SparseSelfAttention]:
    return {name: each for name, each in model.named_modules() if isinstance(each, SparseSelfAttention)}


def attach(context: Context) -> Hooks | None:
    """Record the pattern in checkpoints, if the section is there. Collective over: the pipe axis then."""
    section = context.plan.config.sparse_attention
    if section is None:
        return None
    layers = sorted(
        {name for names in context.mesh["pipe"].gather_objects(list(_sparse_layers(context.module))) for name in names}
    )
    record = {"section": section.model_dump(), "layers": layers}

    def check(state: Mapping[str, Any]) -> None:
        if not isinstance(state.get("section"), dict):
            msg = f"the section of the pattern is {state.get('section')!r:.100}; expected a table"
            raise ConfigError(msg)

    return Hooks(state=lambda: record, check=check, load=lambda _: None)
