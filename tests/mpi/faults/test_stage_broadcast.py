"""The job that sends an archive: its folders are in use from the beginning, and a broken source ends in a sentence."""

import hashlib
import json
import os
import time

import pytest
from mpi4py import MPI

from mpispeed.staging import archive, broadcast, folders

pytestmark = pytest.mark.ranks(1)


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.setenv("MPISPEED_STAGE_DIR", str(folder))
    return folder


@pytest.fixture
def packed(tmp_path):
    """An archive of one file, and its seal."""
    line = f"f 644 1 3 0 {hashlib.sha256(b'abc').hexdigest()} x"
    raw = "\n".join([json.dumps({"format": archive.FORMAT}), line, ""]).encode()
    path = tmp_path / "archive.tar"
    path.write_bytes(b"abc".ljust(512, b"\0") + raw)
    return path, str(archive.Seal(512, len(raw), hashlib.sha256(raw).hexdigest()))


def send(source, seal, job="p1"):
    return broadcast.stage(
        MPI.COMM_SELF, source, seal, ["--name", folders.name_for(job), "--bytes", "9", "--inodes", "9"]
    )


def test_another_start_keeps_the_folder_that_an_archive_is_sent_to_for_long(place, packed, monkeypatch, world):
    sent, seen = broadcast._sent, []

    def long_sent(leaders, source, copy):
        failed = sent(leaders, source, copy)
        long_ago = time.time() - 2 * folders.GRACE_SECONDS
        for path in (copy, copy.parent / "lock"):
            os.utime(path, (long_ago, long_ago))
        seen.extend(folders.left_over([place]))
        return failed

    monkeypatch.setattr(broadcast, "_sent", long_sent)
    failed, folder = send(*packed)
    assert (failed, seen) == ("", [])
    assert (folder / "x").read_bytes() == b"abc"
    assert list(folders.left_over([place])) == []  # used a moment ago
    long_ago = time.time() - 2 * folders.GRACE_SECONDS
    os.utime(folder / "lock", (long_ago, long_ago))
    assert list(folders.left_over([place])) == [folder]  # nobody holds it after the sending


def test_a_source_that_cannot_be_read_is_a_sentence_and_leaves_nothing(place, packed, tmp_path, monkeypatch, world):
    failed, _ = send(tmp_path / "none", packed[1])
    assert "No such file" in failed

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(broadcast.os, "preadv", broken)
    failed, _ = send(*packed)
    assert failed.endswith("archive.tar cannot be read: Input/output error")
    assert list(place.iterdir()) == []
    assert list(place.iterdir()) == []


def test_a_node_that_can_start_no_process_is_a_sentence(place, packed, monkeypatch, world):
    monkeypatch.setattr(broadcast.sys, "executable", "/none/python")
    failed, _ = send(*packed)
    assert failed.endswith(": no process can be started to unpack: No such file or directory")
    assert list(place.iterdir()) == []


def test_an_end_that_tells_of_a_full_disk_is_a_sentence(place, packed, monkeypatch, world):
    close = os.close

    def full(file):
        close(file)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broadcast.os, "close", full)
        problem = broadcast._sent(MPI.COMM_SELF, packed[0], place / "copy")
    assert problem == f"{place}/copy cannot be written: No space left on device"
