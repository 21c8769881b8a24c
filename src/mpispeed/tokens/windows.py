"""Windows: so many tokens of a store one after the other, wherever documents begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mpispeed.base.errors import ConfigError
from mpispeed.native.token_reads import Labels
from mpispeed.tokens.masks import mark_documents
from mpispeed.tokens.samples import LabelKind, Sample, StoreSamples, check_length, shift_of
from mpispeed.tokens.splits import split_range
from mpispeed.tokens.store import TokenStore


class TokenWindows(StoreSamples):
    """The tokens of a store, or of some of its documents, cut into samples of `length` in their order.

    Sample i begins at token i * length of them. Its labels "next" are the tokens that follow, of which the last one
    is the first of sample i + 1; a rest that fills no sample is left out. It has `input_ids` and maybe `labels`,
    int64 [length].
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        *,
        split: Sequence[float] | None = None,
        part: int = 0,
        labels: LabelKind = "next",
        documents: bool = False,
    ) -> None:
        """Choose the tokens that are cut into samples.

        Args:
            store: an open store.
            length: tokens of a sample.
            split: weights that cut the documents, in their order, into parts such as those of training and validation.
            part: number of the part, from 0.
            labels: "next", "same" for models that shift labels by themselves, or "none".
            documents: add `position_ids` and `document_ids`, and learn nothing from one document about another.

        Raises:
            ConfigError: no sample comes of it.
        """
        check_length(length)
        self.store, self.length, self.labels, self.documents = store, length, labels, documents
        self._shift = shift_of(labels)
        begin, stop = split_range(store.document_count, split, part)
        firsts, lasts = store.bounds([begin, stop - 1])
        self._begin, tokens = int(firsts[0]), int(lasts[1]) - int(firsts[0])
        self._count = (tokens - self._shift) // length
        if not self._count:
            msg = f"{store.path}: {tokens} tokens are too few for a sample of {length}; use a shorter one"
            raise ConfigError(msg)

    def __len__(self) -> int:
        return self._count

    def _read(self, numbers: NDArray[np.int64]) -> Sample:
        starts, taken = self._begin + numbers * self.length, self.length + self._shift
        sample: Sample = {"input_ids": torch.empty(len(numbers), self.length, dtype=torch.int64)}
        second: Labels | None = None
        if self.labels != "none":
            sample["labels"] = torch.empty_like(sample["input_ids"])
            second = Labels(sample["labels"], self._shift)
        self.store.read_into(sample["input_ids"], starts, np.full(len(numbers), taken), labels=second)
        if self.documents:
            low, high = self.store.documents_around(starts, starts + taken)
            mark_documents(sample, self.store.begins(low, high - low) - starts[:, None], self.labels)
        return sample
