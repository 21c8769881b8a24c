"""A finished token store that is open for reading: tokens, where documents begin, columns.

Nothing of the size of the store is held: every value is read from the file by position when it is asked for. So it
starts at once, forked workers share it, and all ranks of a node have one open file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mpispeed.native.token_reads import FileTable, Labels, PastEnd, read_rows
from mpispeed.tokens import layout, reader
from mpispeed.tokens.descriptor import share_descriptor
from mpispeed.tokens.errors import NoTokenStore, TokenStoreError, UnfinishedStore
from mpispeed.tokens.layout import Places
from mpispeed.tokens.positions import read_elements

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

Numbers = Sequence[int] | NDArray[np.int64]


class TokenStore:
    """An open store. It may be used in forked processes, and by several threads; pickled, it opens the file again.

    Attributes:
        path: of the file.
        places: where everything lies in it.
        facts: what its manifest tells: tokenizer, vocabulary_size, eos, source and others.
        token_count: tokens of all documents.
        document_count: documents.
        row_count: rows of packed documents; None if documents are not packed.
        dtype: of token ids in the file, "u2" or "u4".
        columns: dtypes of columns by name.
    """

    def __init__(
        self, path: Path, handle: int, places: Places, facts: Mapping[str, Any], sums: Mapping[str, int]
    ) -> None:
        """Take over an open file, as `open_store` does.

        Args:
            path: of the file.
            handle: its descriptor, which is closed with this.
            places: its layout, checked.
            facts: of its manifest.
            sums: checksums of its lists of checksums, which tell stores apart.
        """
        self.path, self.places, self.facts, self._sums = path, places, facts, dict(sums)
        self.token_count, self.document_count = places.token_count, places.document_count
        self.row_count, self.dtype = places.row_count, places.dtype
        self.columns = {name: place.dtype for name, place in places.columns.items()}
        self._handle = handle
        # each row is announced with its bytes; what the kernel would guess beyond them is read for nothing
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_RANDOM)
        self._tokens, self._documents = self._table(layout.TOKENS), self._table(layout.DOCUMENTS)
        self._rows = self._table(layout.ROWS) if layout.ROWS in places.tables else None
        self._lookup = self._table(layout.LOOKUP)
        self._end = weakref.finalize(self, os.close, handle)

    def _table(self, name: str) -> FileTable:
        place = self.places.tables[name]
        return FileTable(self._handle, place.offset, place.count, place.itemsize)

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, {self.token_count} tokens, {self.document_count} documents)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self.path, self._sums)

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reopened(self, path: str | os.PathLike[str]) -> TokenStore:
        """The same store in another file, such as a copy on the disk of this node.

        Raises:
            TokenStoreError: it is no copy of this store, or no store.
        """
        return _opened_again(Path(path), self._sums)

    def close(self) -> None:
        """Close the file in this process; idempotent."""
        self._end()

    def fileno(self) -> int:
        """The descriptor, as long as the store is open. Raises TokenStoreError if it is closed."""
        if not self._end.alive:
            msg = f"{self.path}: this token store was closed"
            raise TokenStoreError(msg)
        return self._handle

    def read(self, start: int, count: int) -> torch.Tensor:
        """Token ids, int64 [count], from any place on.

        Raises:
            TokenStoreError: there are not so many.
            OSError: the file cannot be read.
        """
        out = torch.empty(1, max(0, count), dtype=torch.int64)
        self.read_into(out, [start], [count])
        return out[0]

    def read_into(
        self, out: torch.Tensor, starts: Numbers, counts: Numbers, *, fill: int = 0, labels: Labels | None = None
    ) -> None:
        """Fill the rows of a matrix with runs of tokens, all by one call; cut or filled up to its length.

        Args:
            out: int64 or int32 [B, L], contiguous on the host.
            starts: first token of each run, [B].
            counts: tokens of each run, [B].
            fill: what stands behind a run.
            labels: a second matrix that is filled from the same bytes.

        Raises:
            TokenStoreError: a run is not in the store.
            OSError: the file cannot be read.
            ValueError: shapes or dtypes do not fit.
        """
        self._read(layout.TOKENS, self._tokens, out, starts, counts, fill, labels)

    def bounds(self, documents: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First token of each document, and the one behind its last.

        Raises:
            TokenStoreError: there is no such document, or the table is damaged.
            OSError: the file cannot be read.
        """
        return self._pairs(layout.DOCUMENTS, self._documents, documents, self.token_count)

    def row_documents(self, rows: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First document of each row, and the one behind its last. Raises as `bounds`, also if nothing is packed."""
        if self._rows is None:
            msg = f"{self.path}: its documents are not packed into rows; build it with --pack LENGTH"
            raise TokenStoreError(msg)
        return self._pairs(layout.ROWS, self._rows, rows, self.document_count)

    def begins(self, first: Numbers, counts: Numbers) -> NDArray[np.int64]:
        """First tokens of runs of documents; behind the last document that is the end of all tokens.

        Args:
            first: first document of each run, [B].
            counts: documents of each, [B], at least 1.

        Returns:
            [B, most of counts]; shorter runs are filled up with the number of all tokens.

        Raises:
            TokenStoreError: there are no such documents, or the table is damaged.
            OSError: the file cannot be read.
        """
        wanted = np.asarray(counts, np.int64)
        out = torch.empty(len(wanted), int(wanted.max(initial=0)), dtype=torch.int64)
        self._read(layout.DOCUMENTS, self._documents, out, first, wanted, fill=self.token_count)
        found: NDArray[np.int64] = out.numpy()
        steps = np.diff(found, axis=1)
        bad = (found < 0).any(1) | (found > self.token_count).any(1) | (steps < 0).any(1)
        bad |= ((steps == 0) & (np.arange(1, found.shape[1]) < wanted[:, None])).any(1)
        if bad.any():
            run = bad.argmax()
            msg = f"{self.path}: /documents is damaged from {first[run]} on: it does not increase everywhere"
            raise TokenStoreError(msg)
        return found

    def documents_around(self, starts: Numbers, stops: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Documents among which those of runs of tokens are: a first one at or before each, and one behind.

        The two are so near to the runs as /lookup is fine: there are at most 2 * 4096 documents more in between.

        Args:
            starts: first token of each run, [B].
            stops: token behind the last one of each, [B]; runs are not empty.

        Raises:
            TokenStoreError: a run is not in the store, or /lookup is damaged.
            OSError: the file cannot be read.
        """
        first, stop = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
        low = self._column_of(layout.LOOKUP, self._lookup, first // layout.LOOKUP_TOKENS)
        marks = (stop - 1) // layout.LOOKUP_TOKENS + 1
        high = np.full(len(marks), self.document_count, np.int64)
        inside = marks < self._lookup.count
        high[inside] = self._column_of(layout.LOOKUP, self._lookup, marks[inside]) + 1
        most = stop - first + 2 * layout.LOOKUP_TOKENS
        bad = (low < 0) | (high <= low) | (high > self.document_count) | (high - low > most)
        if bad.any():
            msg = f"{self.path}: /lookup is damaged near token {first[bad.argmax()]}"
            raise TokenStoreError(msg)
        return low, high

    def column(self, name: str, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Values of a column for documents from `begin` to `end`, all by default.

        Raises:
            TokenStoreError: there is no such column, or there are no such documents.
            OSError: the file cannot be read.
        """
        place = self.places.columns.get(name)
        if place is None:
            msg = f"{self.path} has no column {name!r:.60}; it has {', '.join(self.columns) or 'none'}"
            raise TokenStoreError(msg)
        stop = self.document_count if end is None else end
        return read_elements(self.fileno(), place, begin, stop - begin)

    def _read(
        self,
        name: str,
        table: FileTable,
        out: torch.Tensor,
        starts: Numbers,
        counts: Numbers,
        fill: int = 0,
        labels: Labels | None = None,
    ) -> None:
        self.fileno()
        try:
            read_rows(table, np.asarray(starts, np.int64), np.asarray(counts, np.int64), out, fill=fill, labels=labels)
        except PastEnd as failure:
            msg = f"{self.path}: of /{name}, {failure}"
            raise TokenStoreError(msg) from failure
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, str(self.path)) from failure

    def _pairs(
        self, name: str, table: FileTable, numbers: Numbers, last: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Elements `n` and `n + 1` of a table that increases from 0 to `last`."""
        wanted = np.asarray(numbers, np.int64)
        out = torch.empty(len(wanted), 2, dtype=torch.int64)
        self._read(name, table, out, wanted, np.full(len(wanted), 2))
        found: NDArray[np.int64] = out.numpy()
        bad = (found[:, 0] < 0) | (found[:, 1] <= found[:, 0]) | (found[:, 1] > last)
        if bad.any():
            msg = f"{self.path}: /{name} is damaged at {wanted[bad.argmax()]}: it does not increase"
            raise TokenStoreError(msg)
        return found[:, 0], found[:, 1]

    def _column_of(self, name: str, table: FileTable, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        out = torch.empty(len(numbers), 1, dtype=torch.int64)
        self._read(name, table, out, numbers, np.ones(len(numbers), np.int64))
        found: NDArray[np.int64] = out[:, 0].numpy()
        return found


def open_store(path: str | os.PathLike[str], node: Comm | None = None) -> TokenStore:
    """Open a finished store for reading.

    Args:
        path: of the file.
        node: the ranks of a node, of which the first opens the file for all; every rank by itself without it.

    Raises:
        NoTokenStore: there is none.
        UnfinishedStore: its writer has not come to the end.
        TokenStoreError: it is damaged. With `node`, all raise the same.

    Collective over: `node`, if it is given.
    """
    place = Path(path)
    if node is None:
        return TokenStore(place, *_opened(place))
    return _open_on_node(place, node)


def _opened(path: Path) -> tuple[int, Places, Mapping[str, Any], Mapping[str, int]]:
    """Descriptor, layout, facts and checksums of a store."""
    handle = reader.open_file(path)
    try:
        found = reader.read_contents(path, handle)
    except BaseException:
        os.close(handle)
        raise
    return handle, found.places, dict(found.manifest.facts), dict(found.manifest.lists)


_KINDS: Mapping[str, type[TokenStoreError]] = {kind.__name__: kind for kind in (NoTokenStore, UnfinishedStore)}


def _open_on_node(path: Path, node: Comm) -> TokenStore:
    handle: int | None = None
    told: tuple[Any, ...] | None = None
    failure: TokenStoreError | None = None
    if node.rank == 0:
        try:
            handle, *parts = _opened(path)
            told = ("", "", *parts)
        except TokenStoreError as caught:
            failure = caught
            told = (type(caught).__name__, str(caught))
        except BaseException:
            node.share((TokenStoreError.__name__, f"{path} cannot be opened"))
            raise
    kind, text, *parts = node.share(told)
    if kind:
        raised = failure or _KINDS.get(kind, TokenStoreError)(text)
        raised.is_collective = True
        raise raised
    own = share_descriptor(node, handle)
    with node.together(TokenStoreError):
        if own is None:
            own = reader.open_file(path)
        return TokenStore(path, own, *parts)


def _opened_again(path: Path, sums: Mapping[str, int]) -> TokenStore:
    store = open_store(path)
    if store._sums != sums:
        store.close()
        msg = f"{path} is not the token store that was opened first: its checksums are others"
        raise TokenStoreError(msg)
    return store
