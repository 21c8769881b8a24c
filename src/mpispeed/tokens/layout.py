"""The parts of a token store: an HDF5 file laid out at once, whose elements are written and read by position.

    /                       attributes: format, version
    /manifest               text[65536]: what is in the file, with checksums; see `packed_manifest`
    /tokens                 u2 or u4 [N]: token ids of all documents, one document after the other
    /documents              u8 [D + 1]: where each document begins in /tokens; the last one is N. No document is empty
    /lookup                 u8 [ceil(N / 4096)]: the document in which token 4096 i lies
    /rows                   u8 [R + 1]: first document of each row; the last one is D. Only where documents are packed
    /columns/NAME/values    [D]: a number for each document, such as a metric of difficulty
    /columns/NAME/manifest  text[4096]
    /columns/NAME/checksums u4: as below, of the values
    /checksums/NAME         u4: CRC-32C of each block of 4 MiB of /NAME, the last one maybe shorter

All datasets are contiguous, without filters, little endian; those of 64 KiB and more begin at multiples of 4096.
HDF5's own data is complete when the file gets its name: whatever a writer leaves, any tool for HDF5 opens the file.
It is unfinished until /manifest says that it is complete, which is written last.

All objects of the root have their headers in the first 4096 bytes of the file. `columns` needs that to add a column
by one write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from mpispeed.native.checksum import crc32c
from mpispeed.tokens.errors import TokenStoreError

FORMAT = "mpispeed token store"
VERSION = 1

TOKENS, DOCUMENTS, LOOKUP, ROWS = "tokens", "documents", "lookup", "rows"
COLUMNS, CHECKSUMS, MANIFEST, VALUES = "columns", "checksums", "manifest", "values"

LOOKUP_TOKENS = 4096
"""Tokens from one entry of /lookup to the next."""
BLOCK_BYTES = 4 << 20
"""Bytes of one checksum."""
MANIFEST_BYTES = 64 << 10
COLUMN_MANIFEST_BYTES = 4 << 10
MOST_TOKENS = 1 << 56
"""So that no sum of offsets overflows."""
MOST_COLUMNS = 32
MOST_NAME_BYTES = 56
"""Of columns: the header of /columns has room for so many."""

TOKEN_DTYPES = ("u2", "u4")
COLUMN_DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")
_COLUMN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,55}")
_CRC_LINE = re.compile(rb"crc32c ([0-9a-f]{8})\n")


@dataclass(frozen=True, slots=True)
class Place:
    """A dataset of one dimension in the file.

    Attributes:
        offset: of its first byte in the file.
        count: elements.
        dtype: name of the dtype of an element, as "u2".
    """

    offset: int
    count: int
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype[1:])

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.count * self.itemsize

    @property
    def block_count(self) -> int:
        """Number of blocks that have a checksum each."""
        return -(-self.nbytes // BLOCK_BYTES)

    def block(self, number: int) -> tuple[int, int]:
        """Offset in the file and bytes of a block."""
        first = number * BLOCK_BYTES
        return self.offset + first, min(BLOCK_BYTES, self.nbytes - first)

    @property
    def numpy(self) -> np.dtype:
        """The dtype of an element, little endian."""
        return np.dtype(f"<{self.dtype}")


@dataclass(frozen=True)
class Places:
    """The layout of a file as it is: small, and the same on all ranks.

    Attributes:
        tables: datasets by their name below the root; that of a column is "columns/NAME".
        lists: the checksums of each, by the same names.
        manifests: offset and bytes of the manifest ("") and of those of columns (by the names of their tables).
    """

    tables: Mapping[str, Place]
    lists: Mapping[str, Place]
    manifests: Mapping[str, tuple[int, int]]

    @property
    def token_count(self) -> int:
        """Tokens of all documents."""
        return self.tables[TOKENS].count

    @property
    def document_count(self) -> int:
        """Documents of the file."""
        return self.tables[DOCUMENTS].count - 1

    @property
    def row_count(self) -> int | None:
        """Rows of packed documents; None if documents are not packed."""
        return self.tables[ROWS].count - 1 if ROWS in self.tables else None

    @property
    def dtype(self) -> str:
        """The dtype of token ids."""
        return self.tables[TOKENS].dtype

    @property
    def columns(self) -> dict[str, Place]:
        """The columns by name."""
        return {name.partition("/")[2]: place for name, place in self.tables.items() if is_column(name)}


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        is_complete: the file, or the column, has been written to its end.
        lists: checksums of the lists of checksums, by names of tables.
        facts: what is known of the contents, plain values of JSON. Of a store: tokenizer, vocabulary_size, eos,
            source and others.
        sizes: what the tables must be: tokens, documents, rows, dtype. Empty for a column.
    """

    is_complete: bool
    facts: Mapping[str, Any]
    lists: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)


def is_column(table: str) -> bool:
    """True if this is the table of a column."""
    return table.startswith(f"{COLUMNS}/")


def column_table(name: str) -> str:
    """Name of the table of a column."""
    return f"{COLUMNS}/{name}"


def check_columns(columns: Mapping[str, str]) -> None:
    """Check names and dtypes of columns.

    Raises:
        TokenStoreError: there can be no such columns.
    """
    for name, dtype in columns.items():
        if not _COLUMN_NAME.fullmatch(name):
            msg = f"{name!r:.80} cannot name a column; use up to {MOST_NAME_BYTES} letters, digits, _.+-, no sign first"
            raise TokenStoreError(msg)
        if dtype not in COLUMN_DTYPES:
            msg = f"the column {name} cannot be of dtype {dtype!r:.20}; use one of {', '.join(COLUMN_DTYPES)}"
            raise TokenStoreError(msg)
    if len(columns) > MOST_COLUMNS:
        msg = f"{len(columns)} columns are more than the {MOST_COLUMNS} that a store has room for"
        raise TokenStoreError(msg)


def table_shapes(tokens: int, documents: int, dtype: str, rows: int | None = None) -> Iterator[tuple[str, int, str]]:
    """Name, elements and dtype of all tables but columns, in the order in which they lie in the file.

    Raises:
        TokenStoreError: there can be no such store.
    """
    if dtype not in TOKEN_DTYPES:
        msg = f"token ids cannot be of dtype {dtype!r:.20}; use {' or '.join(TOKEN_DTYPES)}"
        raise TokenStoreError(msg)
    if not 1 <= documents <= tokens <= MOST_TOKENS:
        msg = f"{documents} documents with {tokens} tokens make no store: each has a token, all at most 2**56"
        raise TokenStoreError(msg)
    if rows is not None and not 1 <= rows <= documents:
        msg = f"{documents} documents cannot be packed into {rows} rows: each row has a document at least"
        raise TokenStoreError(msg)
    yield TOKENS, tokens, dtype
    yield DOCUMENTS, documents + 1, "u8"
    yield LOOKUP, -(-tokens // LOOKUP_TOKENS), "u8"
    if rows is not None:
        yield ROWS, rows + 1, "u8"


def ends_of(places: Places) -> Iterator[tuple[str, int, int]]:
    """Tables of numbers that increase, with their first and last element."""
    yield DOCUMENTS, 0, places.token_count
    if ROWS in places.tables:
        yield ROWS, 0, places.document_count


def sizes_of(places: Places) -> dict[str, Any]:
    """What a manifest says of the tables."""
    return {
        "tokens": places.token_count,
        "documents": places.document_count,
        "rows": places.row_count,
        "dtype": places.dtype,
        "block_bytes": BLOCK_BYTES,
        "lookup_tokens": LOOKUP_TOKENS,
    }


def packed_manifest(manifest: Manifest, room: int) -> bytes:
    """The text of a manifest: a line with the checksum of the rest, JSON, and spaces up to the bytes of its dataset.

    Raises:
        TokenStoreError: it has no room there.
    """
    parts = {"complete": manifest.is_complete, **manifest.sizes, "lists": manifest.lists, "facts": manifest.facts}
    text = json.dumps(parts, allow_nan=False, default=str).encode() + b"\n"
    head = len(b"crc32c 00000000\n")
    if len(text) > room - head:
        msg = f"facts of a store take {len(text)} bytes of JSON, and there is room for {room - head}; leave some out"
        raise TokenStoreError(msg)
    body = text.ljust(room - head, b" ")
    return b"crc32c %08x\n" % crc32c(body) + body


def read_manifest(raw: bytes) -> Manifest | None:
    """What the bytes of a manifest say; None if nothing was ever written there.

    Raises:
        TokenStoreError: they are damaged.
    """
    if not raw.strip(b"\0"):
        return None
    found = _CRC_LINE.match(raw)
    if found is None or int(found[1], 16) != crc32c(raw[found.end() :]):
        msg = "the manifest does not have its checksum"
        raise TokenStoreError(msg)
    try:
        parts = json.loads(raw[found.end() :])
    except (ValueError, RecursionError) as failure:
        msg = f"the manifest is no JSON: {failure}"
        raise TokenStoreError(msg) from failure
    return _manifest(parts)


def _manifest(parts: Any) -> Manifest:
    known = isinstance(parts, dict) and isinstance(parts.get("complete"), bool)
    lists, facts = (parts.get("lists"), parts.get("facts")) if known else (None, None)
    if not isinstance(lists, dict) or not isinstance(facts, dict):
        msg = "the manifest is not one of a token store"
        raise TokenStoreError(msg)
    if not all(isinstance(value, int) and 0 <= value < 1 << 32 for value in lists.values()):
        msg = "the manifest has a checksum that is no number of 32 bits"
        raise TokenStoreError(msg)
    sizes = {name: value for name, value in parts.items() if name not in ("complete", "lists", "facts")}
    return Manifest(parts["complete"], MappingProxyType(facts), lists, sizes)
