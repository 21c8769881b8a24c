"""Metrics of the samples of a token store: length, rarity of tokens, what a column or a function says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.index_layout import Array
from mpispeed.curriculum.metrics import batches, split
from mpispeed.tokens.documents import TokenDocuments
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.samples import BatchedSamples, LabelKind
from mpispeed.tokens.splits import split_range
from mpispeed.tokens.store import TokenStore
from mpispeed.tokens.windows import TokenWindows

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

Kind = Literal["documents", "windows", "rows"]
Numbers = npt.NDArray[np.int64]

_SAMPLES, _TOKENS = 1 << 16, 1 << 22
"""Samples and tokens that are looked at at a time."""
_FIXED = 1 << 24
_MOST_COUNTED = 1 << 24


@dataclass(frozen=True)
class StoreSamples:
    """The samples of a data set over a store, as tokens `begin` to `stop` of it for each.

    Attributes:
        store: an open store.
        kind: documents, windows of `length` tokens, or packed rows.
        count: samples.
        dataset: what reads them; None for documents without a length.
        first: number of the first document, token or row.
    """

    store: TokenStore
    kind: Kind
    count: int
    dataset: BatchedSamples | None
    first: int

    @classmethod
    def of(
        cls,
        store: TokenStore,
        kind: Kind,
        length: int | None = None,
        *,
        split: Sequence[float] | None = None,
        part: int = 0,
        labels: LabelKind = "next",
    ) -> StoreSamples:
        """The samples of `TokenDocuments`, `TokenWindows` or `TokenRows` with these arguments.

        Raises:
            ConfigError: there are none.
        """
        dataset: BatchedSamples | None = None
        if kind == "rows":
            dataset = TokenRows(store, length, split=split, part=part, labels=labels)
            first, stop = split_range(store.row_count or 0, split, part)
            return cls(store, kind, stop - first, dataset, first)
        first, stop = split_range(store.document_count, split, part)
        if kind == "documents":
            if length is not None:
                dataset = TokenDocuments(store, length, split=split, part=part, labels=labels)
            return cls(store, kind, stop - first, dataset, first)
        if length is None:
            msg = "windows need a length, in tokens"
            raise ConfigError(msg)
        dataset = TokenWindows(store, length, split=split, part=part, labels=labels)
        return cls(store, kind, len(dataset), dataset, int(store.bounds([first])[0][0]))

    def begins(self, start: int, stop: int) -> Numbers:
        """The first token of samples `start` to `stop`, and the token behind the last of them; at least one sample."""
        numbers = np.arange(start, stop, dtype=np.int64) + self.first
        if self.kind == "windows":
            length = self.dataset.length  # type: ignore[union-attr]
            return self.first + np.arange(start, stop + 1, dtype=np.int64) * length
        if self.kind == "rows":
            firsts, behind = self.store.row_documents(numbers)
            numbers = np.append(firsts, behind[-1] - 1)
            starts, stops = self.store.bounds(numbers)
            return np.append(starts[:-1], stops[-1])
        starts, stops = self.store.bounds(numbers)
        return np.append(starts, stops[-1])


def lengths(samples: StoreSamples, start: int, stop: int) -> Numbers:
    """Tokens of samples `start` to `stop`."""
    return np.concatenate([np.empty(0, np.int64), *(np.diff(begins) for begins in _begins(samples, start, stop))])


def rarities(comm: Comm, samples: StoreSamples, start: int, stop: int) -> npt.NDArray[np.float64]:
    """The vocabulary rarity of samples `start` to `stop`: the sum of -log p over their tokens, in nats.

    p is the share of a token among the tokens of all samples of all ranks, each of which has some range of them. Sums
    are of multiples of 2^-24, so that the result is the same for any number of ranks. "DeepSpeed Data Efficiency"
    (arXiv:2212.03597) takes the measure from "Competence-based curriculum learning" (arXiv:1903.09848).

    Collective over: `comm`.

    Raises:
        UsageError: on all ranks, if the store cannot be read or its vocabulary is too large to be counted.
    """
    with comm.together(UsageError, doing="counting tokens"):
        size = samples.store.facts.get("vocabulary_size")
        size = 1 << 16 if samples.store.dtype == "u2" else size
        if not isinstance(size, int) or not 0 < size <= _MOST_COUNTED:
            msg = f"{samples.store.path} has a vocabulary of {size}; rarity is for vocabularies up to {_MOST_COUNTED}"
            raise UsageError(msg)
        counts = np.zeros(size, np.int64)
        for begins in _begins(samples, start, stop):
            for _, tokens in _pieces(samples, begins):
                if int(tokens.max(initial=0)) >= size:
                    msg = f"{samples.store.path}: token {tokens.max()} is not in its vocabulary of {size}"
                    raise UsageError(msg)
                counts += np.bincount(tokens, minlength=size)
    comm.all_reduce(torch.from_numpy(counts))
    share = np.maximum(counts, 1) / max(1, counts.sum())
    information = np.rint(-np.log(share) * _FIXED).astype(np.int64)
    found = [np.empty(0, np.int64)]
    with comm.together(UsageError, doing="measuring rarity"):
        for begins in _begins(samples, start, stop):
            sums = np.zeros(len(begins) - 1, np.int64)
            for place, tokens in _pieces(samples, begins):
                first = int(np.searchsorted(begins, place, "right")) - 1
                last = int(np.searchsorted(begins, place + len(tokens), "left"))
                sums[first:last] += np.add.reduceat(information[tokens], np.maximum(begins[first:last] - place, 0))
            found.append(sums)
    rarity: npt.NDArray[np.float64] = np.concatenate(found) / _FIXED
    return rarity


def column_values(samples: StoreSamples, name: str, start: int, stop: int) -> Array:
    """What a column of the store has for documents `start` to `stop` of the samples.

    Raises:
        ConfigError: the samples are no documents.
    """
    if samples.kind != "documents":
        msg = f"a column has a value for each document; it cannot be the metric of {samples.kind}"
        raise ConfigError(msg)
    return samples.store.column(name, samples.first + start, samples.first + stop)


def called(
    samples: StoreSamples, function: Callable[[Any], Any], name: str, start: int, stop: int, batch_size: int
) -> Array:
    """What a function says of batches of samples `start` to `stop`: one number a sample.

    Raises:
        ConfigError: documents without a length cannot be batches.
        UsageError: it said something else.
    """
    if samples.dataset is None:
        msg = f"metric {name!r}: a function gets batches of documents of one length; give the length"
        raise ConfigError(msg)
    found: list[Array] = []
    for first, rows, batch in batches(samples.dataset, start, stop, batch_size):
        values = function(batch)
        values = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if values.shape not in ((rows,), (rows, 1)) or values.dtype.kind not in "iuf":
            what = f"{values.dtype} of shape {list(values.shape)}"
            msg = f"metric {name!r}: {what} came for samples {first} to {first + rows - 1}; one number each is wanted"
            raise UsageError(msg)
        found.append(values.reshape(-1))
    return np.concatenate(found) if found else np.empty(0, np.int64)


def whole_numbers(values: Array, scale: float) -> Numbers:
    """Values as index files have them: integers as they are, others times `scale` and rounded.

    Raises:
        UsageError: a value is not finite, or too large.
    """
    if values.dtype.kind in "iu":
        return values.astype(np.int64)
    scaled = np.rint(values.astype(np.float64) * scale)
    if scaled.size and not np.abs(scaled).max() < 2.0**63:
        msg = f"values from {scaled.min()} to {scaled.max()}, times {scale}, do not fit integers of 64 bits"
        raise UsageError(msg)
    return scaled.astype(np.int64)


def own_range(comm: Comm, samples: StoreSamples) -> tuple[int, int]:
    """The samples of this rank."""
    return split(0, samples.count, comm.size)[comm.rank]


def _begins(samples: StoreSamples, start: int, stop: int) -> Iterator[Numbers]:
    for first in range(start, stop, _SAMPLES):
        yield samples.begins(first, min(first + _SAMPLES, stop))


def _pieces(samples: StoreSamples, begins: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Places and tokens of all tokens of consecutive samples."""
    for place in range(int(begins[0]), int(begins[-1]), _TOKENS):
        yield place, samples.store.read(place, min(_TOKENS, int(begins[-1]) - place)).numpy()
