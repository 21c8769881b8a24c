"""Rows of a packed store: whole documents one behind the other, with what keeps them apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpispeed.base.errors import ConfigError
from mpispeed.tokens.documents import filling, padded
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.masks import mark_documents
from mpispeed.tokens.samples import LabelKind, Sample, StoreSamples, check_length, shift_of
from mpispeed.tokens.splits import split_range
from mpispeed.tokens.store import TokenStore

ROW_LENGTH = "row_length"
"""Name of the fact that says for how many tokens rows were packed."""
_MOST_LENGTH = 1 << 24
"""A file that asks for longer samples is not followed."""


class TokenRows(StoreSamples):
    """The rows of a store that was built with `--pack LENGTH`.

    A sample has `input_ids`, maybe `labels`, `position_ids` and `document_ids`, int64 [length]. No token is learned
    from another document. What fills a row up is a document of its own, with labels -100.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int | None = None,
        *,
        split: Sequence[float] | None = None,
        part: int = 0,
        labels: LabelKind = "next",
        fill: int | None = None,
    ) -> None:
        """Choose the rows of samples.

        Args:
            store: an open store with rows.
            length: tokens of a sample; by default those for which it was packed. Longer rows are cut.
            split: weights that cut the rows, in their order, into parts.
            part: number of the part, from 0.
            labels: "next", "same" for models that shift labels by themselves, or "none".
            fill: the token of padding; by default what ends documents, or 0.

        Raises:
            ConfigError: no sample comes of it, or the store is not packed.
        """
        if store.row_count is None:
            msg = f"{store.path}: its documents are not packed; build it with --pack LENGTH, or use TokenWindows"
            raise ConfigError(msg)
        told = store.facts.get(ROW_LENGTH)
        self._packed_for = told if type(told) is int and 0 < told <= _MOST_LENGTH else None
        if length is None and self._packed_for is None:
            msg = f"{store.path} does not say for how many tokens its rows were packed; give the length"
            raise ConfigError(msg)
        self.length = length or self._packed_for or 0
        check_length(self.length)
        shift_of(labels)
        self.store, self.labels = store, labels
        self.fill = filling(store) if fill is None else fill
        self._begin, self._stop = split_range(store.row_count, split, part)

    def __len__(self) -> int:
        return self._stop - self._begin

    def _read(self, numbers: NDArray[np.int64]) -> Sample:
        first, stop = self.store.row_documents(self._begin + numbers)
        most = int((stop - first).max(initial=1))
        if most > max(self.length, self._packed_for or 0):
            msg = f"{self.store.path}: a row has {most} documents, more than tokens: /rows is damaged"
            raise TokenStoreError(msg)
        begins = self.store.begins(first, stop - first + 1)
        starts, ends = begins[:, 0], begins[np.arange(len(first)), stop - first]
        begins = np.minimum(begins, ends[:, None])  # what a shorter row was filled up with is no document of it
        taken = np.minimum(ends - starts, self.length)
        sample = padded(self.store, self.length, starts, taken, self.fill, self.labels)
        mark_documents(sample, begins - starts[:, None], self.labels)
        return sample
