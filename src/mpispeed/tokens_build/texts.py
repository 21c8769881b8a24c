"""Documents of text files and of lines of JSON, by ranges of bytes that need no scan before."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from mpispeed.base.plain import printable, read_json
from mpispeed.tokens_build.errors import BuildError, Faults
from mpispeed.tokens_build.inputs import (
    BATCH_BYTES,
    JSON_LINES,
    MOST_DOCUMENT_BYTES,
    Batch,
    Input,
    Reading,
    Slice,
    TokenRun,
    open_input,
)

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_TOO_LONG = f"it has more than {MOST_DOCUMENT_BYTES >> 20} MiB, which is too long for one document"


class Line(NamedTuple):
    """A line or a paragraph, and where it begins; `raw` None: it is too long."""

    start: int
    raw: bytes | None


def cut(number: int, one: Input, reading: Reading, part_bytes: int) -> Iterator[Slice]:
    """Slices of a file, each of at most `part_bytes`.

    A document belongs to the slice in which it begins. A compressed file, and one that is a single document, is one
    slice.
    """
    is_whole = one.size <= part_bytes or (reading.documents == "file" and one.kind != JSON_LINES)
    if not is_whole:  # only then it has to be opened, of maybe many
        with open_input(one) as file:
            is_whole = file.read(2) == _GZIP
    step = max(1, one.size) if is_whole else part_bytes
    for begin in range(0, one.size, step):
        stop = min(one.size, begin + step)
        yield Slice(number, begin, stop, stop - begin)


def read(one: Input, begin: int, stop: int, reading: Reading, faults: Faults) -> Iterator[Batch]:
    """The documents that begin in bytes `begin` to `stop`.

    Raises:
        BuildError: the file cannot be read or has changed, or has a bad record and `faults` ends at the first.
    """
    with open_input(one) as raw:
        is_packed = begin == 0 and raw.read(2) == _GZIP
        raw.seek(0)
        if is_packed:
            with gzip.GzipFile(fileobj=raw) as unpacked, io.BufferedReader(cast(Any, unpacked), 1 << 20) as file:
                yield from _read(one, cast(BinaryIO, file), 0, 1 << 62, reading, faults)
        else:
            yield from _read(one, raw, begin, stop, reading, faults)


def _read(one: Input, file: BinaryIO, begin: int, stop: int, reading: Reading, faults: Faults) -> Iterator[Batch]:
    is_json = one.kind == JSON_LINES
    units = {"line": _lines, "paragraph": _paragraphs, "file": _whole}["line" if is_json else reading.documents]
    batch = _Batches()
    try:
        for start, raw in units(file, begin, stop):
            try:
                value = _document(raw if start else _without_mark(raw), reading.field if is_json else None)
            except ValueError as failure:
                faults.bad(_place_of(one, start), str(failure))
                continue
            if value is not None and batch.add(value, len(raw or b"")):
                yield from batch.take()
    except (OSError, EOFError, zlib.error) as failure:
        msg = f"{printable(one.path)} cannot be read: {failure}"
        raise BuildError(msg) from failure
    yield from batch.take()


def _without_mark(raw: bytes | None) -> bytes | None:
    return raw[len(_BOM) :] if raw is not None and raw.startswith(_BOM) else raw


class _Batches:
    """Documents that wait to be handed on, texts and token ids in their order."""

    def __init__(self) -> None:
        self._values: list[str | list[int]] = []
        self._bytes = 0

    def add(self, value: str | list[int], nbytes: int) -> bool:
        """Take a document; True where it is time to hand on."""
        self._values.append(value)
        self._bytes += nbytes
        return self._bytes >= BATCH_BYTES

    def take(self) -> Iterator[Batch]:
        """What waits, in runs of one kind."""
        values, self._values, self._bytes = self._values, [], 0
        if all(type(value) is str for value in values):
            if values:
                yield cast("list[str]", values)
            return
        at = 0
        while at < len(values):
            end, kind = at, type(values[at])
            while end < len(values) and type(values[end]) is kind:
                end += 1
            yield cast("list[str]", values[at:end]) if kind is str else _run(cast("list[list[int]]", values[at:end]))
            at = end


def _run(values: list[list[int]]) -> TokenRun:
    lengths = np.array([len(value) for value in values], np.int64)
    return TokenRun(np.array([token for value in values for token in value], np.int64), lengths)


# -- lines and paragraphs ----------------------------------------------------------------------------------------------


def _lines(file: BinaryIO, begin: int, stop: int) -> Iterator[Line]:
    position = _first_line(file, begin)
    while position < stop:
        raw: bytes | None = file.readline(MOST_DOCUMENT_BYTES + 1)
        if not raw:
            return
        start, position = position, position + len(raw)
        if len(raw) > MOST_DOCUMENT_BYTES:
            position += _skip_line(file) if not raw.endswith(b"\n") else 0
            raw = None
        yield Line(start, raw)


def _first_line(file: BinaryIO, begin: int) -> int:
    """Go to the first line that begins at `begin` or later."""
    if not begin:
        return 0
    file.seek(begin - 1)
    return begin - 1 + _skip_line(file)


def _skip_line(file: BinaryIO) -> int:
    count = 0
    while raw := file.readline(1 << 20):
        count += len(raw)
        if raw.endswith(b"\n"):
            break
    return count


def _paragraphs(file: BinaryIO, begin: int, stop: int) -> Iterator[Line]:
    """Lines that are not empty, joined until an empty one; a paragraph belongs to where its first line begins."""
    is_after_empty = _is_after_empty(file, begin)
    held: list[bytes | None] = []
    start = size = 0
    for line in _lines(file, begin, 1 << 62):
        is_empty = line.raw is not None and line.raw in (b"\n", b"\r\n")
        if held and is_empty:
            yield _paragraph(start, held, size)
            held = []
        if not held and (line.start >= stop):
            return
        if not is_empty and (held or is_after_empty):
            if not held:
                start, size = line.start, 0
            size += len(line.raw or b"")
            held.append(line.raw if size <= MOST_DOCUMENT_BYTES else None)
            if held[-1] is None:
                held = [None]
        is_after_empty = is_empty or is_after_empty
    if held:
        yield _paragraph(start, held, size)


def _paragraph(start: int, held: list[bytes | None], size: int) -> Line:
    pieces = [raw for raw in held if raw is not None]
    return Line(start, b"".join(pieces) if len(pieces) == len(held) and size <= MOST_DOCUMENT_BYTES else None)


def _is_after_empty(file: BinaryIO, begin: int) -> bool:
    """Whether the first line at `begin` or later comes after an empty one, or is the first of all."""
    first = _first_line(file, begin)
    before = max(0, first - 3)
    file.seek(before)
    tail = file.read(first - before)
    is_empty = tail.endswith((b"\n\n", b"\n\r\n")) or (before == 0 and tail in (b"", b"\n", b"\r\n"))
    file.seek(0)
    return is_empty


def _whole(file: BinaryIO, begin: int, stop: int) -> Iterator[Line]:
    raw = file.read(MOST_DOCUMENT_BYTES + 1)
    yield Line(0, raw if len(raw) <= MOST_DOCUMENT_BYTES else None)


# -- documents ---------------------------------------------------------------------------------------------------------


def _document(raw: bytes | None, field: str | None) -> str | list[int] | None:
    """The text or the token ids of a line; None where it is empty.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    if raw is None:
        raise ValueError(_TOO_LONG)
    if field is None:
        try:
            return raw.decode().rstrip("\r\n") or None
        except UnicodeDecodeError as failure:
            msg = f"byte {failure.start} of it is no UTF-8; convert the file (iconv -t UTF-8)"
            raise ValueError(msg) from None
    raw = raw.rstrip(b"\r\n")
    return None if raw.isspace() or not raw else _value(read_json(raw), field)


def _value(found: Any, field: str) -> str | list[int]:
    if not isinstance(found, dict):
        msg = f"it is no object; expected one with {printable(field, 60)!r}"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    if field not in found:
        names = ", ".join(repr(printable(name, 40)) for name in list(found)[:8]) or "nothing"
        msg = f"it has no {printable(field, 60)!r} (it has {names}); name the entry of documents with --field"
        raise ValueError(msg)
    value = found[field]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            msg = f"{printable(field, 60)!r} has half of a surrogate pair, which is no text"
            raise ValueError(msg) from None
        return value
    if isinstance(value, list) and all(type(each) is int for each in value):
        if value and not (min(value) >= 0 and max(value) < 1 << 32):
            msg = f"{printable(field, 60)!r} has the token id {min(value) if min(value) < 0 else max(value)}; expected "
            msg += "0 to 2^32 - 1"
            raise ValueError(msg)
        return value
    msg = f"{printable(field, 60)!r} is neither a text nor a list of token ids"
    raise ValueError(msg)


def _place_of(one: Input, start: int) -> Callable[[], str]:
    return lambda: f"{printable(one.path)}, line {line_number(one, start)}"


def line_number(one: Input, start: int) -> int:
    """The number (from 1) of the line that has the byte `start`; reads all before it."""
    with open_input(one) as raw:
        is_packed = raw.read(2) == _GZIP
        raw.seek(0)
        file: Any = gzip.GzipFile(fileobj=raw) if is_packed else raw
        number, left = 1, start
        while left and (block := file.read(min(left, 1 << 20))):
            number, left = number + block.count(b"\n"), left - len(block)
    return number
