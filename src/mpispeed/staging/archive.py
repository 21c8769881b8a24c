"""Reads and checks the manifest of an archive: plain files and folders inside of it, each with its digest.

An archive is a tar file, so that people can look into it; nothing but its last member, the manifest, is believed. Its
first line is JSON, each further one a folder (`d PATH`) or a file (`f MODE MTIME SIZE OFFSET SHA256 PATH`; `t` for
texts that name the folder).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpispeed.base.errors import StagingError

FORMAT = 1
PLACEHOLDER = b"@STAGED_FOLDER@"
"""Stands for the folder in texts of the archive that have to name it."""


@dataclass(frozen=True)
class Seal:
    """Position and SHA-256 of the manifest in an archive; whoever has the seal can tell a changed archive."""

    offset: int
    size: int
    sha256: str

    def __str__(self) -> str:
        return f"{self.offset}.{self.size}.{self.sha256}"

    @classmethod
    def parse(cls, text: str) -> Seal:
        """The seal in a text.

        Raises:
            StagingError: the text is none.
        """
        match = re.fullmatch(r"(\d{1,15})\.(\d{1,10})\.([0-9a-f]{64})", text)
        if match is None:
            msg = f"{text!r} is no seal of an archive; take the one that `mpispeed stage show` prints"
            raise StagingError(msg)
        return cls(int(match[1]), int(match[2]), match[3])


@dataclass(frozen=True)
class Member:
    """A plain file of an archive; `is_text` if it names the folder."""

    path: str
    offset: int
    size: int
    mode: int
    mtime: int
    sha256: str
    is_text: bool = False


@dataclass(frozen=True)
class Manifest:
    """List of what is in an archive: facts for the launcher, folders, and files in the order of their offsets."""

    facts: dict[str, Any]
    folders: tuple[str, ...]
    members: tuple[Member, ...]


def read_manifest(file: int, seal: Seal) -> Manifest:
    """Read and check the manifest of an open archive.

    Raises:
        StagingError: it is not the sealed one, or lists what must not be in an archive.
    """
    size = os.fstat(file).st_size
    if seal.offset + seal.size > size:
        msg = f"the archive has {size} bytes, but its manifest should end at {seal.offset + seal.size}"
        raise StagingError(msg)
    raw = os.pread(file, seal.size, seal.offset)
    found = hashlib.sha256(raw).hexdigest()
    if found != seal.sha256:
        msg = f"the archive was changed: its manifest has SHA-256 {found}, not {seal.sha256}; pack it again"
        raise StagingError(msg)
    return parse_manifest(raw, seal.offset)


def parse_manifest(raw: bytes, data_bytes: int) -> Manifest:
    """The manifest in `raw`, of an archive whose data end at `data_bytes`.

    Raises:
        StagingError: it lists anything but plain files and folders inside of the archive.
    """
    try:
        first, *lines = raw.decode(errors="surrogateescape").removesuffix("\n").split("\n")
        facts = json.loads(first)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            msg = "the archive is not of this format (1): pack it with this version of mpispeed"
            raise StagingError(msg)
        folders = [line[2:] for line in lines if line.startswith("d ")]
        members = [_member(line) for line in lines if not line.startswith("d ")]
    except (ValueError, RecursionError) as error:
        msg = f"the manifest of the archive cannot be read: {error}"
        raise StagingError(msg) from None
    _check(folders, members, data_bytes)
    return Manifest(facts, tuple(folders), tuple(members))


def _member(line: str) -> Member:
    kind, mode, mtime, size, offset, digest, path = line.split(" ", 6)
    if kind not in ("f", "t"):
        msg = f"the archive has a member of kind {kind!r} ({path!r}); only plain files and folders are taken"
        raise StagingError(msg)
    return Member(path, int(offset), int(size), int(mode, 8) & 0o777, int(mtime), digest, kind == "t")


def _check(folders: Sequence[str], members: Sequence[Member], data_bytes: int) -> None:
    """Refuse paths that leave the folder, that come twice or without their folder, and data that overlap."""
    known = set(folders)
    paths = [*folders, *(member.path for member in members)]
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            msg = f"the archive has two members {path!r}"
            raise StagingError(msg)
        seen.add(path)
        words = path.split("/")
        if path.startswith("/") or "\0" in path or any(word in ("", ".", "..") for word in words):
            msg = f"the archive has a member that would leave its folder: {path!r}"
            raise StagingError(msg)
        if len(words) > 1 and path.rpartition("/")[0] not in known:
            msg = f"the archive has no folder for its member {path!r}"
            raise StagingError(msg)
    end = 0
    for member in members:
        if member.offset < end or member.size < 0 or member.offset + member.size > data_bytes:
            msg = f"the data of {member.path!r} are not where the archive has room for them"
            raise StagingError(msg)
        end = member.offset + member.size
