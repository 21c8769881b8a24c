"""Parts joined to a store: each rank copies some of them to their places, and takes checksums on the way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpispeed.base.errors import MpispeedError
from mpispeed.ckpt.format.sparse_image import write_at
from mpispeed.tokens import create, layout
from mpispeed.tokens_build.block_sums import BlockSums, Pieces, combine
from mpispeed.tokens_build.errors import BuildError, writing
from mpispeed.tokens_build.part_file import Part, PartFacts, Shape, total_of
from mpispeed.tokens_build.work_folder import WorkFolder

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

LENGTH, RARITY = "length", "rarity"
_DTYPES = {LENGTH: "u4", RARITY: "f8"}
_PLAIN = (MpispeedError, OSError)


@dataclass(frozen=True, slots=True)
class Base:
    """Numbers of the first token, document and row of a part in the store."""

    tokens: int
    documents: int
    rows: int


class SummedWriter:
    """Writes elements of a store, with checksums of what it writes. Use it in a with."""

    def __init__(self, path: Path, places: layout.Places) -> None:
        self._writer, self.places = create.StoreWriter(path, places), places
        self._sums = {table: BlockSums(layout.BLOCK_BYTES) for table in places.tables}

    def __enter__(self) -> SummedWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.__exit__(*error)

    def put(self, table: str, first: int, values: npt.NDArray[Any]) -> None:
        """Write elements of a table, from number `first` on.

        Raises:
            TokenStoreError: the table has no such elements, or does not hold the values.
            OSError: the file system refuses.
        """
        if not len(values):
            return
        place = self.places.tables[table]
        self._writer.put(table, first, values)
        self._sums[table].add(first * place.itemsize, values.astype(place.numpy, copy=False))

    def pieces(self) -> dict[str, Pieces]:
        """Checksums of all that was written."""
        return {table: sums.pieces() for table, sums in self._sums.items()}


def write_sums(path: Path, places: layout.Places, found: Sequence[Mapping[str, Pieces]]) -> None:
    """Write the checksums of all blocks, from those of the pieces that ranks have written. For one rank.

    Raises:
        BuildError: not every element was written, or some were twice.
        OSError: the file system refuses.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for table, place in places.tables.items():
            sums = combine([each[table] for each in found], place.nbytes, layout.BLOCK_BYTES)
            write_at(handle, sums.astype(places.lists[table].numpy).data.cast("B"), places.lists[table].offset)
    finally:
        os.close(handle)


def lookup_entries(begins: npt.NDArray[np.uint64], tokens: int, documents: int) -> tuple[int, npt.NDArray[np.uint64]]:
    """The entries of /lookup that lie in documents: the number of the first one, and the entries.

    Args:
        begins: of documents, and the end of the last, counted from the first token [D + 1].
        tokens: number of that token in the store.
        documents: number of the first document in the store.
    """
    step = layout.LOOKUP_TOKENS
    first, stop = -(-tokens // step), -(-(tokens + int(begins[-1])) // step)
    wanted = (np.arange(first, stop, dtype=np.int64) * step - tokens).astype(np.uint64)
    return first, (np.searchsorted(begins, wanted, side="right") - 1 + documents).astype(np.uint64)


def join(
    comm: Comm,
    folder: WorkFolder,
    shape: Shape,
    digest: str,
    facts: Sequence[PartFacts],
    columns: Sequence[str],
    told: Mapping[str, Any],
) -> None:
    """Write the store, complete, into the folder of parts.

    Args:
        comm: the ranks that join.
        folder: of the parts, which are all whole.
        shape: of the parts.
        digest: of the build.
        facts: of all parts, in order.
        columns: numbers for each document.
        told: facts for the manifest.

    Collective over: comm.

    Raises:
        BuildError: on every rank.
    """
    total = total_of(facts)
    places = None
    with comm.together(BuildError, plain=_PLAIN), writing(folder.store):
        if comm.rank == 0:
            places = create.create(
                folder.store, tokens=total.tokens, documents=total.documents, dtype=shape.dtype,
                rows=total.rows if shape.row else None, columns={name: _DTYPES[name] for name in columns}, facts=told,
            )  # fmt: skip
    places = comm.share(places)
    own = list(_share_of(facts, comm.rank, comm.size))
    information = _information(comm, folder, shape, digest, own) if shape.counts else None
    pieces: dict[str, Pieces] = {}
    with (
        comm.together(BuildError, plain=_PLAIN),
        writing(folder.store),
        SummedWriter(folder.store, places) as writer,
    ):
        for one, base in own:
            with Part(folder.part(one.number), shape, digest) as part:
                _copy(writer, part, base, columns, information)
        if comm.rank == 0:
            writer.put(layout.DOCUMENTS, total.documents, np.array([total.tokens], np.uint64))
            if shape.row:
                writer.put(layout.ROWS, total.rows, np.array([total.documents], np.uint64))
        pieces = writer.pieces()
    found = comm.gather_objects(pieces)
    with comm.together(BuildError, plain=_PLAIN), writing(folder.store):
        if comm.rank == 0:
            write_sums(folder.store, places, found)
            create.finish(folder.store, places)


def _share_of(facts: Sequence[PartFacts], rank: int, size: int) -> Iterator[tuple[PartFacts, Base]]:
    """The parts of a rank, neighbours of about the same sum of tokens, and where they go."""
    total = max(1, sum(one.tokens for one in facts))
    tokens = documents = rows = 0
    for one in facts:
        if min(size - 1, (tokens + one.tokens // 2) * size // total) == rank:
            yield one, Base(tokens, documents, rows)
        tokens, documents, rows = tokens + one.tokens, documents + one.documents, rows + one.rows


def _information(
    comm: Comm, folder: WorkFolder, shape: Shape, digest: str, own: Iterable[tuple[PartFacts, Base]]
) -> npt.NDArray[np.float64]:
    """-log of the share of each token among all tokens [V]. Collective over: comm."""
    import torch

    counts = np.zeros(shape.vocabulary, np.int64)
    with comm.together(BuildError, plain=_PLAIN):
        for one, _ in own:
            with Part(folder.part(one.number), shape, digest) as part:
                counts += part.counts().astype(np.int64)
    summed = torch.from_numpy(counts)
    comm.all_reduce(summed)
    share = np.maximum(summed.numpy(), 1) / summed.numpy().sum()
    return -np.log(share)


def _copy(
    writer: SummedWriter, part: Part, base: Base, columns: Sequence[str], information: npt.NDArray[np.float64] | None
) -> None:
    """One part to its place."""
    begins = part.begins()
    lengths = np.diff(begins.astype(np.int64))
    rarity = np.zeros(len(lengths))
    done = 0
    for tokens in part.tokens():
        writer.put(layout.TOKENS, base.tokens + done, tokens)
        if information is not None:
            _add_rarity(rarity, information[tokens], begins, done)
        done += len(tokens)
    if not done:
        return
    writer.put(layout.DOCUMENTS, base.documents, begins[:-1] + np.uint64(base.tokens))
    writer.put(layout.LOOKUP, *lookup_entries(begins, base.tokens, base.documents))
    if layout.ROWS in writer.places.tables:
        writer.put(layout.ROWS, base.rows, part.rows() + np.uint64(base.documents))
    values = {LENGTH: lengths, RARITY: rarity}
    for name in columns:
        writer.put(layout.column_table(name), base.documents, values[name])


def _add_rarity(
    rarity: npt.NDArray[np.float64], values: npt.NDArray[np.float64], begins: npt.NDArray[np.uint64], done: int
) -> None:
    """Add the information of tokens from number `done` on to that of their documents."""
    first = int(np.searchsorted(begins, done, side="right")) - 1
    stop = int(np.searchsorted(begins, done + len(values), side="left"))
    starts = np.maximum(begins[first:stop].astype(np.int64) - done, 0)
    rarity[first:stop] += np.add.reduceat(values, starts)
