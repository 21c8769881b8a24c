"""Copies of data files: their names, their bytes, and what is wrong with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.data import node_copies
from mpispeed.data.node_copies import COPIED, copy_blocks, names_of, require_copyable


def test_names_are_numbers_with_plain_suffixes() -> None:
    files = [
        "/a/text.bin",
        "/a/text.idx",
        "/b/text.bin",
        "/a/other.bin",
        "c.h5",
        "d",
        "/e/x.a b",
        "/e/x.c d",
        "f.tar.gz",
    ]
    names = names_of(files)
    assert names == ["0.bin", "0.idx", "1.bin", "2.bin", "3.h5", "4", "5", "6", "7.gz"]
    assert all(COPIED.files.fullmatch(each) for name in names for each in (name, f"{name}.part"))


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 12_345, 100_000])
def test_bytes_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(node_copies, "BLOCK", 4096)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(nbytes))
    stops = list(copy_blocks(str(source), target, source.stat()))
    assert target.read_bytes() == source.read_bytes()
    assert len(stops) == 2 * -(-nbytes // 4096) + 1
    with pytest.raises(FileExistsError):
        list(copy_blocks(str(source), target, source.stat()))


def test_a_source_that_changes_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * 100)
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ConfigError, match="was changed while it was copied"):
        list(copy_blocks(str(source), tmp_path / "one", status))
    source.write_bytes(b"x" * 50)
    with pytest.raises(ConfigError, match="ends at byte 50, before its length"):
        list(copy_blocks(str(source), tmp_path / "two", status))


def test_a_copy_that_gives_other_bytes_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_copies, "BLOCK", 4096)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(20_000))
    blocks = copy_blocks(str(source), target, source.stat())
    for _ in range(6):
        next(blocks)
    target.chmod(0o600)
    with target.open("r+b") as file:
        file.seek(8200)
        byte = file.read(1)
        file.seek(8200)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(ConfigError, match="damaged at byte 8192"):
        list(blocks)


def test_a_data_set_has_to_say_what_it_reads() -> None:
    with pytest.raises(ConfigError, match=r"a range does not say which files it reads; give .* files\(\) and reopened"):
        require_copyable(range(3))
