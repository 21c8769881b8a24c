"""Data sets over a token store: batches by one read, and samples as rows of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from mpispeed.base.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpispeed.tokens.store import TokenStore

Sample = dict[str, torch.Tensor]
LabelKind = Literal["next", "same", "none"]
"""Labels of a sample: the next tokens, the tokens themselves (for models that shift them), or none."""

IGNORED = -100
"""The label of what is not to be learned, as torch's cross entropy has it."""


class BatchedSamples(Dataset[Sample], ABC):
    """A data set of samples by number that reads a batch at once. Without state: it may be used in forked workers."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def _read(self, numbers: NDArray[np.int64]) -> Sample:
        """The batch of these samples, whose numbers are checked."""

    def read_batch(self, indices: Sequence[int]) -> Sample:
        """The samples of a batch as tensors [B, L].

        Raises:
            IndexError: there is no such sample.
            TokenStoreError: the store is damaged there.
            OSError: it cannot be read.
        """
        numbers, count = np.ascontiguousarray(indices, np.int64), len(self)
        if len(numbers) and int(numbers.view(np.uint64).max()) >= count:  # negative ones are very large so
            bad = numbers[(numbers < 0) | (numbers >= count)][0]
            msg = f"sample {bad} is asked for of {count}"
            raise IndexError(msg)
        return self._read(numbers)

    def files(self) -> list[Path]:
        """The files that are read, for copies on the disks of nodes; by default none."""
        return []

    def reopened(self, paths: Mapping[str, str]) -> Self:
        """The same samples of copies of the files.

        Args:
            paths: of the copies, by the texts of the paths of the files.

        Raises:
            TokenStoreError: one is no copy, or no store.
        """
        return self

    def __getitem__(self, index: int) -> Sample:
        return {name: rows[0] for name, rows in self.read_batch([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """The samples of a batch one by one, as torch's loaders take them."""
        batch = self.read_batch(indices)
        return [{name: rows[number] for name, rows in batch.items()} for number in range(len(indices))]


class StoreSamples(BatchedSamples):
    """Samples of one store.

    Attributes:
        store: the open store.
    """

    store: TokenStore

    def files(self) -> list[Path]:
        """The file of the store."""
        return [self.store.path]

    def reopened(self, paths: Mapping[str, str]) -> Self:
        """As `BatchedSamples.reopened`."""
        found = copy.copy(self)
        found.store = self.store.reopened(paths[str(self.store.path)])
        return found


def check_length(length: int) -> None:
    """Check the length of samples. Raises ConfigError if it is not positive."""
    if length < 1:
        msg = f"samples cannot have {length} tokens; use 1 or more"
        raise ConfigError(msg)


def shift_of(labels: LabelKind) -> int:
    """Tokens from a sample's first one to its first label. Raises ConfigError for a kind that there is not."""
    if labels not in ("next", "same", "none"):
        msg = f'labels={labels!r:.40} is no kind of labels; use "next", "same" or "none"'
        raise ConfigError(msg)
    return 1 if labels == "next" else 0
