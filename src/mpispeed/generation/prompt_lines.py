"""Prompts as lines of JSON: the scan of a file, and one line as a record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpispeed.base.plain import printable, read_json
from mpispeed.generation.prompt_index import JSON_LINES, MOST_PROBLEMS, IdSet, Index, SpanList
from mpispeed.generation.requests import ALIASES, OPTIONS, Options, PromptError, check_text, options_of
from mpispeed.native.checksum import crc32c

MOST_ID_LETTERS = 1024
_BOM = b"\xef\xbb\xbf"
_MOST_IGNORED = 20
_MESSAGES = "messages"

#: first bytes of files that are sometimes taken for JSONL -> what they are, and what to do
_OTHERS = {
    b"\x1f\x8b": "is compressed by gzip; gunzip it first",
    b"BZh": "is compressed by bzip2; bunzip2 it first",
    b"\xfd7zXZ": "is compressed by xz; unxz it first",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; unzstd it first",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet file; write its rows as lines of JSON",
    b"\xff\xfe": "is UTF-16; write it as UTF-8",
    b"\xfe\xff": "is UTF-16; write it as UTF-8",
}


@dataclass(frozen=True, slots=True)
class Record:
    """The content of a line.

    Attributes:
        id: of the prompt; None where there is none.
        content: a text, token ids, or the messages of a chat.
        options: of generation.
        others: names of further entries.
    """

    id: str | None
    content: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    options: Options
    others: tuple[str, ...] = ()


def scan(path: Path, file: BinaryIO, field: str, id_field: str | None, most_bytes: int) -> Index:
    """Read all lines once, and check each.

    Raises:
        PromptError: naming the first lines that are wrong.
    """
    head = file.read(8)
    for magic, problem in _OTHERS.items():
        if head.startswith(magic):
            msg = f"{path} {problem}"
            raise PromptError(msg)
    file.seek(0)
    scanned = _Scan(path, field, id_field, most_bytes)
    scanned.read(file)
    scanned.check_ids(file)
    return Index(
        size_bytes=scanned.size_bytes,
        digest=scanned.digest,
        kind=JSON_LINES,
        contents=scanned.contents.spans(),
        counts=np.array(scanned.counts, np.int64),
        field=field,
        id_field=id_field,
        ignored=tuple(sorted(scanned.ignored)),
    )


class _Scan:
    """The state of a scan."""

    def __init__(self, path: Path, field: str, id_field: str | None, most_bytes: int) -> None:
        self._path, self._field, self._id_field, self._most_bytes = path, field, id_field, most_bytes
        self.contents, self._ids = SpanList(), IdSet()
        self.counts: list[int] = []
        self.ignored: set[str] = set()
        self.size_bytes, self.digest = 0, ""

    def read(self, file: BinaryIO) -> None:
        hashed = blake2b(digest_size=32)
        problems: list[str] = []
        number = 0
        while raw := file.readline(self._most_bytes + 1):
            number += 1
            if len(raw) > self._most_bytes:
                problems.append(f"line {number} has more than {self._most_bytes} bytes; write one prompt in each line")
                break  # where the next line begins is not known
            hashed.update(raw)
            start, self.size_bytes = self.size_bytes, self.size_bytes + len(raw)
            if start == 0 and raw.startswith(_BOM):
                start, raw = len(_BOM), raw[len(_BOM) :]
            line = raw.strip(b" \t\r\n")
            if line:
                try:
                    self._take(line, start + raw.index(line))
                except ValueError as failure:
                    problems.append(f"line {number}: {_with_cure(failure, line, number)}")
                    if len(problems) == MOST_PROBLEMS:
                        break
        if problems:
            raise _problems(self._path, problems)
        if not self.counts:
            msg = f"{self._path} has no prompt; write one text or one object in each line"
            raise PromptError(msg)
        self.digest = f"blake2b:{hashed.hexdigest()}"

    def _take(self, line: bytes, start: int) -> None:
        record = parse(line, self._field, self._id_field)
        self._ids.add(str(len(self.counts)) if record.id is None else record.id)
        self.counts.append(record.options.n or 0)
        self.contents.add(start, len(line), crc32c(line))
        if record.others and len(self.ignored) < _MOST_IGNORED:
            self.ignored.update(printable(name, 60) for name in record.others[: _MOST_IGNORED - len(self.ignored)])

    def check_ids(self, file: BinaryIO) -> None:
        """Check that no id is there twice. A line without one has its position among the prompts as its id."""
        spans, problems = None, []
        for pair in self._ids.suspects():
            spans = spans or self.contents.spans()
            names, places = [], []
            for position in pair:
                file.seek(int(spans.starts[position]))
                record = parse(file.read(int(spans.sizes[position])), self._field, self._id_field)
                names.append(str(position) if record.id is None else record.id)
                places.append(line_number(file, int(spans.starts[position])))
            if names[0] == names[1]:
                problems.append(
                    f"lines {places[0]} and {places[1]} have the same id {printable(names[0], 60)!r}; ids are unique "
                    "(a line without one is called by its position, from 0)"
                )
        if problems:
            raise _problems(self._path, problems)


def line_number(file: BinaryIO, start: int) -> int:
    """The number (from 1) of the line that has the byte `start`; reads all before it."""
    file.seek(0)
    number, left = 1, start
    while left:
        block = file.read(min(left, 1 << 20))
        if not block:
            break
        number, left = number + block.count(b"\n"), left - len(block)
    return number


def parse(line: bytes, field: str, id_field: str | None) -> Record:
    """One line that is not empty.

    Raises:
        ValueError: it is no prompt; the message says why.
    """
    value = read_json(line)
    if isinstance(value, str):
        check_text("the text", value)
        return Record(None, value, Options())
    if not isinstance(value, dict):
        msg = f"it is {_kind(value)}; expected a text or an object with {field!r}"
        raise ValueError(msg)  # noqa: TRY004 - the file is wrong, not the call
    name = None if id_field is None else value.get(id_field)
    if "custom_id" in value and isinstance(value.get("body"), dict):  # a line of OpenAI's batch files
        name = value["custom_id"] if name is None and id_field is not None else name
        value = value["body"]
    key = field if field in value or _MESSAGES not in value else _MESSAGES
    if key not in value:
        msg = f"it has no {field!r} (it has {_names(value)}); name the entry that has the prompt"
        raise ValueError(msg)
    known = {key, id_field, *OPTIONS, *ALIASES}
    others = tuple(each for each in value if each not in known)
    return Record(_id(id_field, name), content_of(key, value[key]), options_of(value), others)


def content_of(key: str, value: Any) -> str | tuple[int, ...] | tuple[dict[str, Any], ...]:
    """The prompt in an entry.

    Raises:
        ValueError: it is neither a text nor token ids nor messages.
    """
    if isinstance(value, str):
        check_text(key, value)
        return value
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            if min(value) < 0 or max(value) >= 2**31:
                msg = f"{key} has the token id {min(value) if min(value) < 0 else max(value)}; expected 0 to 2^31 - 1"
                raise ValueError(msg)
            return tuple(value)
        if all(_is_message(each) for each in value):
            for each in value:
                check_text(f"a message of {key}", each["content"])
            return tuple(value)
    msg = (
        f"{key!r} is {_kind(value)}; expected a text, a list of token ids, or a list of messages, each with the texts "
    )
    msg += '"role" and "content"'
    raise ValueError(msg)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def check_id(name: str) -> str:
    """Check an id: results are found by it.

    Raises:
        ValueError: it is empty or very long, or has NUL or half of a surrogate pair.
    """
    check_text("the id", name)
    if not name or len(name) > MOST_ID_LETTERS or "\0" in name:
        has = "is empty" if not name else f"has {len(name)} letters" if len(name) > MOST_ID_LETTERS else "has NUL"
        msg = f"the id {has}; expected 1 to {MOST_ID_LETTERS} letters without NUL"
        raise ValueError(msg)
    return name


def _id(id_field: str | None, value: Any) -> str | None:
    if value is None:
        return None
    if type(value) not in (str, int):
        msg = f"{id_field!r} is {_kind(value)}; expected a text or a whole number"
        raise ValueError(msg)
    return check_id(str(value))


def _with_cure(failure: ValueError, line: bytes, number: int) -> str:
    """The reason why a line is no prompt, with what it may come from."""
    text = str(failure)
    if line.count(b"\0"):
        return f"it has NUL bytes, as files have that were cut off by a full disk or a crash ({text})"
    if number == 1 and line.startswith(b"["):
        return f"{text}; if the file is one list, write each of its elements in a line of its own (jq -c '.[]')"
    if number == 1 and line == b"{":
        return f"{text}; write each object in one line (jq -c .)"
    return text


def _problems(path: Path, problems: list[str]) -> PromptError:
    more = f"\n  (and perhaps more: the first {MOST_PROBLEMS} are shown)" if len(problems) >= MOST_PROBLEMS else ""
    if len(problems) == 1:
        return PromptError(f"{path}, {problems[0]}")
    return PromptError(f"{path} has lines that are no prompts:" + "".join(f"\n  {each}" for each in problems) + more)


def _kind(value: Any) -> str:
    shown = printable(json.dumps(value, default=repr)[:60], 40)
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return f"{kinds.get(type(value), 'a number')} ({shown})"


def _names(value: dict[str, Any]) -> str:
    names = [printable(name, 40) for name in list(value)[:8]]
    return ", ".join(map(repr, names)) + (", ..." if len(value) > 8 else "") if names else "nothing"
