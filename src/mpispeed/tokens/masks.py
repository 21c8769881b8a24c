"""Documents within samples: positions that begin anew at each, numbers that tell them apart, masks made of these."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mpispeed.tokens.samples import IGNORED, LabelKind, Sample


def mark_documents(sample: Sample, begins: NDArray[np.int64], labels: LabelKind) -> None:
    """Add `position_ids` and `document_ids` [B, L] to a batch; no token is to be learned from another document.

    Positions begin at 0 with the sample and with each document; numbers of documents are 0 in the beginning and rise
    by 1.

    Args:
        sample: a batch with `input_ids` and maybe `labels`.
        begins: [B, M], where documents begin, counted from the sample's first token; those outside of it are left out.
        labels: the kind that it has.
    """
    batch, length = sample["input_ids"].shape
    rows, _ = np.nonzero((begins > 0) & (begins <= length))
    places = begins[(begins > 0) & (begins <= length)]
    inside = places < length
    marks = np.zeros((batch, length), np.int64)
    marks[rows[inside], places[inside]] = 1
    numbers = np.arange(length)
    first = np.maximum.accumulate(marks * numbers, axis=1)
    sample["position_ids"] = torch.from_numpy(numbers - first)
    sample["document_ids"] = torch.from_numpy(marks.cumsum(axis=1))
    if labels == "next":
        sample["labels"].numpy()[rows, places - 1] = IGNORED
    elif labels == "same":
        sample["labels"].numpy()[rows[inside], places[inside]] = IGNORED


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Mask of causal attention within documents, for torch's scaled_dot_product_attention.

    Args:
        document_ids: [B, L] of a batch.

    Returns:
        bool [B, 1, L, L]; true where row i may look at column j.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


def sequence_ends(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where sequences begin and end in a batch laid out as one row, for attention over sequences of several lengths.

    Args:
        position_ids: [B, L] of a batch.

    Returns:
        (int32 [sequences + 1], from 0 to B * L, known as cu_seqlens; tokens of the longest sequence)
    """
    flat = position_ids.reshape(-1)
    begins = (flat == 0).nonzero()[:, 0]
    ends = torch.cat([begins, begins.new_tensor([flat.numel()])]).to(torch.int32)
    return ends, int(ends.diff().max()) if len(begins) else 0
