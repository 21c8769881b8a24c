"""The attention function that transformers' models call by the name "mpispeed"."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from mpispeed.base.errors import UsageError
from mpispeed.nn.attention.core import attend
from mpispeed.nn.hf_attention.documents import Documents, of_lengths, of_mask, of_positions
from mpispeed.nn.sequence.attention import attention
from mpispeed.nn.sequence.running import Running, current


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: over all ranks of the sequence axis in a pass that is cut, else over this rank's tokens.

    Documents come from the mask of `mask`, from `cu_seq_lens_q` or from `position_ids` that begin anew. Everything else
    on one rank (a cache of keys, windows, masks and biases of a model's own) is what transformers does for "sdpa".

    Args:
        module: the layer; `is_causal` of it counts where none is given.
        query: [B, h, S, d].
        key: [B, h_kv, S_k, d]; h is a multiple of h_kv.
        value: [B, h_kv, S_k, d_v].
        attention_mask: of `mask`: None, document numbers [B, S], or a mask [B, 1, S, S_k].
        dropout: share of the probabilities that are dropped.
        scaling: of the scores; None: 1 / sqrt(d).
        is_causal: tokens see only what is before them.
        kwargs: what the model passes on: `position_ids`, `cu_seq_lens_q`, `sliding_window`, `softcap` and others.

    Returns:
        [B, S, h, d_v], and None for the probabilities.

    Collective over: the sequence axis, in a pass that is cut.

    Raises:
        UsageError: a soft cap or sinks, which kernels do not have; in a cut pass also windows shorter than a document,
            biases, caches, and attention between two sequences.
    """
    _check(kwargs)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    running = current()
    if running is not None and running.layout.size > 1:
        _check_cut(running, query, key, attention_mask, kwargs)
        known = None if attention_mask is None else of_mask(attention_mask)
        if known is not None and known.is_causal is not None:
            causal = known.is_causal
        out = attention(query, key, _wide(query, value), causal=causal, scale=scaling, dropout=dropout, running=running)
        return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None
    documents = _documents(query, key, attention_mask, kwargs)
    if documents is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return found
    causal = causal if documents.is_causal is None else documents.is_causal
    if dropout:
        out = _dropped(query, key, value, documents, causal, scaling, dropout)
    else:
        out = attend(query, key, _wide(query, value), documents.pieces(is_causal=causal), scale=scaling)
    return out[..., : value.shape[-1]].transpose(1, 2).contiguous(), None


def _check(kwargs: dict[str, Any]) -> None:
    for name, what in {"softcap": "a soft cap of the scores", "s_aux": "sinks"}.items():
        if kwargs.get(name) is not None:
            msg = f'attention "mpispeed" has no {name} ({what}); load the model with attn_implementation="eager"'
            raise UsageError(msg)


def _check_cut(
    running: Running, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuse what a part of the sequence cannot tell."""
    layout, window = running.layout, kwargs.get("sliding_window")
    longest = Documents(layout.spans, layout.length).longest
    reason = ""
    if window is not None and window < longest:
        reason = f"the layer sees {window} tokens, and a document has {longest}"
    elif kwargs.get("position_bias") is not None:
        reason = "the layer adds a bias by position"
    elif kwargs.get("cache") is not None or key.shape[2] != query.shape[2]:
        reason = f"{query.shape[2]} queries meet {key.shape[2]} keys, of a cache or another sequence"
    elif layout.spans is None and _begins_anew(running, kwargs.get("position_ids")):
        reason = "position_ids begin anew, and the cut of the batch knows no documents; give them to its Layout (spans)"
    elif mask is not None and mask.dim() != 2:
        reason = f"a mask of shape {tuple(mask.shape)} is for whole sequences; give [B, S], cut with the batch"
    if reason:
        msg = f"attention over {running.layout.size} ranks of the sequence axis: {reason}"
        raise UsageError(msg)


def _begins_anew(running: Running, positions: torch.Tensor | None) -> bool:
    """Whether positions of this rank's tokens do not go on by one where the sequence does."""
    if positions is None or positions.is_meta or positions.dim() != 2:  # meta: an estimate, without values
        return False
    if positions.shape[1] != running.layout.count(running.rank):
        return False
    found = of_positions(positions, positions.shape[0])
    if found is None or found.spans is None:
        return False
    borders = {0, *accumulate(end - start for start, end in running.layout.ranges(running.rank))}
    return any(start not in borders for row in found.spans for start, _ in row)


def _documents(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> Documents | None:
    """Documents of whole sequences; None: leave the layer to "sdpa"."""
    batch, length = query.shape[0], query.shape[2]
    if mask is not None and mask.dim() != 2:
        return None
    if key.shape[2] != length or any(kwargs.get(name) is not None for name in ("position_bias", "cache")):
        return None
    found = None
    if mask is not None:
        found = of_mask(mask)
        if found is None:
            msg = "a mask [B, S] has padding between tokens of a document; give a mask [B, 1, S, S]"
            raise UsageError(msg)
    elif batch == 1 and kwargs.get("cu_seq_lens_q") is not None:
        found = of_lengths(kwargs["cu_seq_lens_q"], length)
    elif (positions := kwargs.get("position_ids")) is not None and positions.dim() == 2 and length > 1:
        found = of_positions(positions, batch)
    window = kwargs.get("sliding_window")
    if window is not None and found is not None and window < found.longest:
        msg = f"a document of {found.longest} tokens does not fit the window of {window} that the layer sees; pad "
        raise UsageError(msg + 'samples in place of packing them, or use attn_implementation="sdpa"')
    return found


def _wide(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Values with the width of queries, as kernels want them."""
    return functional.pad(value, (0, query.shape[-1] - value.shape[-1])) if value.shape[-1] < query.shape[-1] else value


def _dropped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents,
    is_causal: bool,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Dropout of probabilities, which pieces cannot have: the kernel draws anew for each."""
    mask = torch.zeros((query.shape[0], 1, query.shape[2], key.shape[2]), dtype=torch.bool, device=query.device)
    for piece in documents.pieces(is_causal=is_causal):
        rows = slice(None) if piece.row is None else slice(piece.row, piece.row + 1)
        part = mask[rows, :, slice(*piece.queries), slice(*piece.keys)]
        part |= torch.ones_like(part).tril() if piece.is_causal else torch.ones_like(part)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=key.shape[1] != query.shape[1]
    )
