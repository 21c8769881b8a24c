"""Masks for the attention implementation: none, numbers of documents [B, S], or, where it must be, [B, 1, S, S_k]."""

from __future__ import annotations

from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.hf_attention.documents import Documents, numbers_by, remember, spans_of
from mpispeed.nn.sequence.running import Running, current


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """What layers get as `attention_mask`, called by transformers once for a forward pass.

    None is one document without padding, causal by the layer. Masks that are no documents, as windows, and steps of
    generation get the mask that transformers makes for "sdpa".

    Raises:
        UsageError: this rank has a part of the sequence, and the mask is not made of documents.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    running = current()
    if running is not None and running.layout.size > 1:
        return _of_part(running, batch_size, q_length, kv_length, q_offset, mask_function, attention_mask, others)
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    dense = {"mask_function": mask_function, "attention_mask": attention_mask, **others}
    if others.get("use_vmap") or q_length != kv_length or _is_shifted(q_offset) or _is_shifted(kv_offset):
        return _dense(sdpa_mask, sizes, dense)
    device = torch.device(others.get("device") or "cpu")
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.to(device)
    skip = "allow_is_causal_skip" if mask_function is causal_mask_function else "allow_is_bidirectional_skip"
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        if padding is None and others.get(skip, skip == "allow_is_causal_skip"):
            return None
        numbers = torch.ones((batch_size, q_length), dtype=torch.int64, device=device)
        is_causal = mask_function is causal_mask_function
    else:
        found = numbers_by(mask_function, batch_size, q_length, device)
        if found is None:
            return _dense(sdpa_mask, sizes, dense)
        numbers, is_causal = found
    numbers = numbers if padding is None else numbers * padding
    spans = spans_of(numbers)
    if spans is None:
        return _dense(sdpa_mask, sizes, dense)
    return remember(numbers, Documents(spans, q_length, is_causal))


def _is_shifted(offset: Any) -> bool:
    return isinstance(offset, torch.Tensor) or offset != 0


def _dense(make: Any, sizes: tuple[Any, ...], others: dict[str, Any]) -> torch.Tensor | None:
    """[B, 1, S, S_k]: what the kernel of "sdpa" takes."""
    found: torch.Tensor | None = make(*sizes, **others)
    return found


def _of_part(
    running: Running,
    batch: int,
    length: int,
    keys: int,
    offset: Any,
    seen: Any,
    padding: torch.Tensor | None,
    others: dict[str, Any],
) -> torch.Tensor | None:
    """The mask where this rank has a part of the sequence: documents are those of the pass, for all ranks."""
    device = torch.device(others.get("device") or "cpu")
    ahead = _looks_ahead(seen, batch, length, device)
    reason = _uncut(running, keys - length, offset, padding, others)
    if not reason and bool(ahead.any()) and not bool(ahead.all()):
        reason = "some tokens see the next one and others do not"
    if reason:
        msg = f"attention over {running.layout.size} ranks of the sequence axis: {reason}"
        raise UsageError(msg)
    is_causal = not bool(ahead.any()) and not _is_full(seen)
    if is_causal and others.get("allow_is_causal_skip", True):
        return None
    return remember(torch.ones((batch, length), dtype=torch.int64, device=device), Documents(None, length, is_causal))


def _uncut(running: Running, cached: int, offset: Any, padding: torch.Tensor | None, others: dict[str, Any]) -> str:
    """Why a mask cannot be told for a part of the sequence, or ""."""
    spans, window = running.layout.spans, others.get("local_size")
    longest = Documents(spans, running.layout.length).longest
    if getattr(others.get("config"), "is_encoder_decoder", False):
        return "models of encoder and decoder have attention between two sequences"
    if cached or _is_shifted(offset):
        return f"{cached} keys come from a cache"
    if window is not None and window < longest:
        return f"the layers see {window} tokens, and a document has {longest}"
    if others.get("use_vmap"):
        return "the model has a mask of its own"
    if padding is not None and spans is None and not bool(padding.all()):
        return "the mask has padding that the cut of the batch does not know; cut the mask with the batch"
    return ""


def _is_full(seen: Any) -> bool:
    from transformers.masking_utils import bidirectional_mask_function

    return seen is bidirectional_mask_function


def _looks_ahead(seen: Any, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Whether tokens see the next one of this rank."""
    rows = torch.arange(batch, device=device)[:, None]
    places = torch.arange(max(length - 1, 0), device=device)[None].expand(batch, -1)
    head = torch.zeros((1, 1), dtype=torch.int64, device=device)
    if not places.numel():
        return torch.zeros(0, dtype=torch.bool, device=device)
    return torch.as_tensor(seen(rows, head, places, places + 1), device=device).expand_as(places)
