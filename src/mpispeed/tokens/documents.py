"""Samples of one document each, cut or padded to one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mpispeed.native.token_reads import Labels
from mpispeed.tokens.samples import IGNORED, LabelKind, Sample, StoreSamples, check_length, shift_of
from mpispeed.tokens.splits import split_range
from mpispeed.tokens.store import TokenStore


class TokenDocuments(StoreSamples):
    """The documents of a store, each from its beginning.

    A sample has `input_ids`, maybe `labels`, and `attention_mask`, which is 1 where tokens are and 0 where it is
    padded; int64 [length]. Padding has the label -100.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        split: Sequence[float] | None = None,
        part: int = 0,
        labels: LabelKind = "next",
        fill: int | None = None,
    ) -> None:
        """Choose the documents of samples.

        Args:
            store: an open store.
            length: tokens of a sample; longer documents are cut.
            split: weights that cut the documents, in their order, into parts.
            part: number of the part, from 0.
            labels: "next", "same" for models that shift labels by themselves, or "none".
            fill: the token of padding; by default what ends documents, or 0.

        Raises:
            ConfigError: no sample comes of it.
        """
        check_length(length)
        self.store, self.length, self.labels = store, length, labels
        self.fill = filling(store) if fill is None else fill
        self._shift = shift_of(labels)
        self._begin, self._stop = split_range(store.document_count, split, part)

    def __len__(self) -> int:
        return self._stop - self._begin

    def _read(self, numbers: NDArray[np.int64]) -> Sample:
        starts, stops = self.store.bounds(self._begin + numbers)
        taken = np.minimum(stops - starts, self.length + self._shift)
        sample = padded(self.store, self.length, starts, taken, self.fill, self.labels)
        held = torch.from_numpy(np.minimum(taken, self.length))
        sample["attention_mask"] = (torch.arange(self.length) < held[:, None]).to(torch.int64)
        return sample


def filling(store: TokenStore) -> int:
    """The token that pads samples: the one that ends documents if the store tells it, else 0."""
    eos = store.facts.get("eos")
    return eos if isinstance(eos, int) and 0 <= eos < 1 << 32 else 0


def padded(
    store: TokenStore, length: int, starts: NDArray[np.int64], counts: NDArray[np.int64], fill: int, labels: LabelKind
) -> Sample:
    """A batch of runs of tokens, each filled up to `length`; the label of what was filled is -100."""
    sample: Sample = {"input_ids": torch.empty(len(starts), length, dtype=torch.int64)}
    second: Labels | None = None
    if labels != "none":
        sample["labels"] = torch.empty_like(sample["input_ids"])
        second = Labels(sample["labels"], shift_of(labels), IGNORED)
    store.read_into(sample["input_ids"], starts, counts, fill=fill, labels=second)
    return sample
