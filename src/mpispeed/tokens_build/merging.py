"""Token stores joined to one: blocks are copied by all ranks, each compared with its checksum when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpispeed.base.errors import MpispeedError
from mpispeed.base.plain import printable
from mpispeed.native.checksum import crc32c
from mpispeed.tokens import create, layout, reader
from mpispeed.tokens.positions import read_bytes, read_elements
from mpispeed.tokens_build.errors import BuildError, writing
from mpispeed.tokens_build.inputs import STORE, Input, find_inputs, open_input
from mpispeed.tokens_build.joining import Base, SummedWriter, lookup_entries, write_sums
from mpispeed.tokens_build.work_folder import Job, WorkFolder, work_folder

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

_PLAIN = (MpispeedError, OSError)
_EQUAL = ("tokenizer", "tokenizer_digest", "vocabulary_size", "eos", "row_length")
"""Facts that stores have to share."""
_SUMMED = ("files", "bytes", "left_out", "empty")


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of joining stores.

    Attributes:
        is_new: False: it was complete already.
        left_out: columns that not all stores have, or not of one dtype.
    """

    is_new: bool
    tokens: int = 0
    documents: int = 0
    rows: int = 0
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class _Plan:
    """Decisions of the first rank that all ranks know."""

    job: Job
    stores: Sequence[reader.Contents]
    bases: Sequence[Base]
    places: layout.Places
    left_out: Sequence[str]


def merge(comm: Comm, output: Path, stores: Sequence[Path]) -> Merged:
    """Join stores, in this order, with the columns that all of them have.

    Args:
        comm: the ranks that copy.
        output: the new store.
        stores: of one tokenizer and one layout of rows; each is compared with its checksums.

    Collective over: comm.

    Raises:
        BuildError: on every rank: a store is damaged or does not fit the others, or the new one cannot be written.
    """
    with work_folder(output, is_first=comm.rank == 0) as folder:
        return _merge(comm, folder, stores)


def _merge(comm: Comm, folder: WorkFolder, stores: Sequence[Path]) -> Merged:
    plan: _Plan | None = None
    with comm.together(BuildError, plain=_PLAIN):
        if comm.rank == 0:
            plan = _planned(folder, stores)
    plan = comm.share(plan)
    if plan is None:
        return Merged(is_new=False)
    pieces: dict[str, Any] = {}
    with comm.together(BuildError, plain=_PLAIN):
        folder.check_seen(plan.job)
        with writing(folder.store), SummedWriter(folder.store, plan.places) as writer:
            _copy(writer, plan, comm.rank, comm.size)
            pieces = writer.pieces()
    found = comm.gather_objects(pieces)
    with comm.together(BuildError, plain=_PLAIN), writing(folder.store):
        if comm.rank == 0:
            write_sums(folder.store, plan.places, found)
            create.finish(folder.store, plan.places)
            folder.publish()
    places = plan.places
    return Merged(True, places.token_count, places.document_count, places.row_count or 0, plan.left_out)


def _planned(folder: WorkFolder, stores: Sequence[Path]) -> _Plan | None:
    """None: the new store is complete already."""
    inputs = find_inputs(stores, STORE)
    job = Job({"merge": len(inputs)}, inputs, 0)
    found = [_contents(one) for one in inputs]
    first = found[0]
    for one, other in zip(inputs, found, strict=True):
        _check_alike(inputs[0], one, first, other)
    columns, left_out = _columns(found)
    sizes = [(one.places.token_count, one.places.document_count, one.places.row_count or 0) for one in found]
    bases = [Base(*(sum(column) for column in zip(*[(0, 0, 0), *sizes[:at]], strict=True))) for at in range(len(sizes))]
    tokens, documents, rows = (sum(column) for column in zip(*sizes, strict=True))
    if not folder.begin(job):
        folder.remove()
        return None
    with writing(folder.store):
        places = create.create(
            folder.store, tokens=tokens, documents=documents, dtype=max(one.places.dtype for one in found),
            rows=rows or None, columns=columns, facts=_facts(found),
        )  # fmt: skip
    return _Plan(job, found, bases, places, left_out)


def _contents(one: Input) -> reader.Contents:
    """What a store has, as it can be sent to other ranks."""
    found = reader.contents_of(Path(one.path))
    columns = {table: _sendable(manifest) for table, manifest in found.columns.items()}
    return replace(found, manifest=_sendable(found.manifest), columns=columns)


def _sendable(manifest: layout.Manifest) -> layout.Manifest:
    return replace(manifest, facts=dict(manifest.facts))


def _check_alike(one: Input, other: Input, first: reader.Contents, second: reader.Contents) -> None:
    for name in _EQUAL:
        had, has = first.manifest.facts.get(name), second.manifest.facts.get(name)
        if had != has:
            msg = f"stores of one kind can be merged: {name} of {printable(one.path)} is {printable(str(had), 100)}, "
            msg += f"that of {printable(other.path)} {printable(str(has), 100)}"
            raise BuildError(msg)
    if (first.places.row_count is None) != (second.places.row_count is None):
        msg = f"of {printable(one.path)} and {printable(other.path)} one is packed into rows, the other is not"
        raise BuildError(msg)


def _columns(found: Sequence[reader.Contents]) -> tuple[dict[str, str], list[str]]:
    """Dtypes of the columns that all stores have, and names of the others."""
    kinds = [{name: place.dtype for name, place in one.places.columns.items()} for one in found]
    names = list(dict.fromkeys(name for each in kinds for name in each))
    shared = {name: kinds[0][name] for name in names if len({each.get(name) for each in kinds}) == 1}
    return shared, [name for name in names if name not in shared]


def _facts(found: Sequence[reader.Contents]) -> dict[str, Any]:
    told = [one.manifest.facts for one in found]
    sources = [facts["source"] if isinstance(facts.get("source"), Mapping) else {} for facts in told]
    counts = {name: sum(_number(source.get(name)) for source in sources) for name in _SUMMED}
    kinds = {str(kind)[:40] for source in sources for kind in _list(source.get("kinds"))}
    return {
        **{name: told[0].get(name) for name in _EQUAL},
        "source": {"kinds": sorted(kinds), **counts, "merged": len(found)},
    }


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _list(value: Any) -> list[Any]:
    return value[:20] if isinstance(value, list) else []


# -- copies ------------------------------------------------------------------------------------------------------------


def _copy(writer: SummedWriter, plan: _Plan, rank: int, size: int) -> None:
    """The blocks of a rank: neighbours of each table, so that each rank reads and writes long runs."""
    for one, contents, base in zip(plan.job.inputs, plan.stores, plan.bases, strict=True):
        with open_input(one) as file:
            for table, place in contents.places.tables.items():
                if table == layout.LOOKUP or table not in plan.places.tables:
                    continue
                sums = _checked_list(one, file.fileno(), contents, table)
                for number in range(place.block_count * rank // size, place.block_count * (rank + 1) // size):
                    values = _block(one, file.fileno(), place, number, int(sums[number]), table)
                    _put(writer, one, file.fileno(), contents, base, table, number, values)
    if rank == 0:
        places = plan.places
        writer.put(layout.DOCUMENTS, places.document_count, np.array([places.token_count], np.uint64))
        if places.row_count is not None:
            writer.put(layout.ROWS, places.row_count, np.array([places.document_count], np.uint64))


def _checked_list(one: Input, handle: int, contents: reader.Contents, table: str) -> npt.NDArray[Any]:
    """The checksums of a table, compared with that of all of them."""
    place = contents.places.lists[table]
    sums = read_elements(handle, place, 0, place.count)
    manifest = contents.columns[table] if layout.is_column(table) else contents.manifest
    if crc32c(sums) != manifest.lists.get(table):
        msg = f"{printable(one.path)} is damaged: the checksums of /{table} are not what they were"
        raise BuildError(msg)
    return sums


def _block(one: Input, handle: int, place: layout.Place, number: int, expected: int, table: str) -> npt.NDArray[Any]:
    raw = read_bytes(handle, *place.block(number))
    if crc32c(raw) != expected:
        msg = f"{printable(one.path)} is damaged: block {number} of /{table} does not have its checksum"
        raise BuildError(msg)
    return np.frombuffer(raw, place.numpy)


def _put(
    writer: SummedWriter,
    one: Input,
    handle: int,
    contents: reader.Contents,
    base: Base,
    table: str,
    number: int,
    values: npt.NDArray[Any],
) -> None:
    """A block to its place, with numbers of tokens and documents moved on."""
    place = contents.places.tables[table]
    first = number * layout.BLOCK_BYTES // place.itemsize
    if table == layout.TOKENS:
        writer.put(table, base.tokens + first, values)
    elif table not in (layout.ROWS, layout.DOCUMENTS):
        writer.put(table, base.documents + first, values)
    elif first < place.count - 1:  # the last number is the first of the next store
        begins = _begins(one, handle, contents.places, table, first, values)
        if table == layout.ROWS:
            writer.put(table, base.rows + first, begins[:-1] + np.uint64(base.documents))
            return
        moved = begins[:-1] + np.uint64(base.tokens)
        writer.put(table, base.documents + first, moved)
        writer.put(layout.LOOKUP, *lookup_entries(begins - begins[0], int(moved[0]), base.documents + first))


def _begins(
    one: Input, handle: int, places: layout.Places, table: str, first: int, values: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """A block of /documents or /rows, and the number behind it.

    Raises:
        BuildError: they do not increase from 0 to the number of all tokens or documents.
    """
    place = places.tables[table]
    stop = first + len(values)
    begins = values if stop == place.count else np.append(values, read_elements(handle, place, stop, 1))
    low, high = next((low, high) for name, low, high in layout.ends_of(places) if name == table)
    is_right = (begins[1:] > begins[:-1]).all() and int(begins[-1]) <= high
    if first == 0:
        is_right = is_right and int(begins[0]) == low
    if first + len(begins) == place.count:
        is_right = is_right and int(begins[-1]) == high
    if not is_right:
        msg = f"{printable(one.path)} is damaged: /{table} must increase from {low} to {high}, and does not between "
        msg += f"elements {first} and {first + len(begins) - 1}"
        raise BuildError(msg)
    return begins
