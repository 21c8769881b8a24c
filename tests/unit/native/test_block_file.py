"""Files for block I/O and memory in whole pages."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from mpispeed.native.block_io import BlockFile, aligned, probe
from tests.helpers.files import FOLDERS, fresh_folder

SIZE = 1 << 18


@pytest.fixture(params=FOLDERS)
def folder(request):
    with fresh_folder(request.param) as made:
        yield made


def test_files_are_opened_carefully(folder):
    path = folder / "mine"
    with BlockFile(path, create=True) as file:
        assert path.stat().st_mode & 0o777 == 0o600
        assert not os.get_inheritable(file._fd)
        assert file.size() == 0
    with pytest.raises(FileExistsError):
        BlockFile(path, create=True)
    with pytest.raises(FileNotFoundError):
        BlockFile(folder / "missing")
    (folder / "link").symlink_to(path)
    with pytest.raises(OSError, match="link") as caught:
        BlockFile(folder / "link")
    assert caught.value.errno == errno.ELOOP
    os.mkfifo(folder / "pipe")
    for readonly in (True, False):
        with pytest.raises(OSError, match="regular file"):
            BlockFile(folder / "pipe", readonly=readonly)
    with pytest.raises(OSError, match="irectory"):
        BlockFile(folder)


def test_direct_can_be_chosen(folder):
    with BlockFile(folder / "plain", create=True, direct=False) as file:
        assert not file.is_direct
    with BlockFile(folder / "auto", create=True) as file:
        assert file.is_direct == probe(folder).is_direct
    if os.access("/sys/kernel/uevent_seqnum", os.R_OK):
        with pytest.raises(OSError, match="O_DIRECT is refused"):
            BlockFile("/sys/kernel/uevent_seqnum", direct=True, readonly=True)


def test_allocate_reserves_and_never_cuts(folder):
    with BlockFile(folder / "space", create=True) as file:
        assert file.allocate(SIZE)
        assert file.size() == SIZE
        assert (folder / "space").stat().st_blocks * 512 >= SIZE
        file.allocate(10)
        assert file.size() == SIZE
        file.truncate(10)
        assert file.size() == 10


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 1 << 21])
def test_aligned_memory(nbytes):
    x = aligned(nbytes)
    assert (x.dtype, x.numel(), x.data_ptr() % 4096 if nbytes else 0) == (torch.uint8, nbytes, 0)
    assert not x.any()
    x.fill_(1)
    y = x[nbytes // 2 :]
    del x
    assert y.all()


def test_aligned_memory_is_given_back():
    def pages():
        return int(Path("/proc/self/statm").read_text().split()[0])

    before = pages()
    for _ in range(50):
        aligned(16 << 20).fill_(1)
    assert (pages() - before) * resource.getpagesize() < 100 << 20
