"""Real processes try their disk together; what is wrong on one rank is told on all, and nobody waits."""

import errno
import shutil
import tempfile
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.native import block_io
from mpispeed.native.block_io import Options
from mpispeed.store.mounts import free_bytes
from mpispeed.store.preflight import preflight
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SwapFolder, clean_stale
from tests.helpers.swap import leftover

pytestmark = pytest.mark.mpi


@pytest.fixture
def root(comm):
    """One new folder, the same on all ranks; nothing may be left in it."""
    path = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-swap-") if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        left = list(path.iterdir())
        shutil.rmtree(path)
        assert left == []


@pytest.fixture
def last(comm):
    """True on the odd one out."""
    return comm.rank == comm.size - 1


def refused(world, root, wanted=1 << 20, options=None):
    with pytest.raises(ConfigError) as caught:
        preflight(world.comm, world.node, root, wanted, options or Options())
    text = str(caught.value)
    assert world.comm.gather_objects(text) == [text] * world.size
    return text


def test_a_good_folder(world, root):
    report = preflight(world.comm, world.node, root, 1 << 20, Options(threads=2))
    assert world.comm.gather_objects(report) == [report] * world.size
    assert len(report.trials) == len(report.hosts) == world.size
    assert report.wanted_bytes == [1 << 20] * world.size


def test_folders_of_one_run_side_by_side(world, root):
    run = world.comm.share(run_name())
    folder = SwapFolder(root, run, world.rank)
    folder.file("x", 1 << 16)
    world.comm.barrier()
    assert clean_stale(root) == []
    assert len(list(folder.path.parent.iterdir())) == world.size
    world.comm.barrier()
    folder.remove()


@pytest.mark.deepspeed_row("a8")
def test_a_missing_folder_is_made(world, root):
    report = preflight(world.comm, world.node, root / "a" / "b", 1 << 20, Options())
    assert report.roots == [str(root / "a" / "b")] * world.size
    world.comm.barrier()
    assert list((root / "a" / "b").iterdir()) == []
    world.comm.barrier()
    if world.rank == 0:
        shutil.rmtree(root / "a")


def test_a_folder_that_the_last_rank_cannot_make(world, root, last):
    link = root / "link"
    if last:
        link.symlink_to(root / "gone")
    text = refused(world, link if last else root)
    assert f"on 1 of {world.size} ranks" in text
    assert f"rank {world.size - 1} on " in text
    assert "does not exist and cannot be made (link is a link that leads nowhere" in text
    world.comm.barrier()
    if last:
        link.unlink()


def test_a_file_in_place_of_the_folder_on_the_last_rank(world, root, last):
    path = root / "file"
    if last:
        path.touch()
    text = refused(world, path if last else root)
    assert f"rank {world.size - 1} on " in text
    assert "no folder" in text
    world.comm.barrier()
    if last:
        path.unlink()


def test_too_little_space_for_all_together(world, root):
    free = world.comm.share(free_bytes(root))
    text = refused(world, root, free // world.size + 1)
    assert f"on {world.size} of {world.size} ranks" in text
    assert "1 % to spare included" in text


def test_a_write_that_fails_on_the_last_rank(world, root, last):
    if last:
        block_io.inject("write", nth=2, errno=errno.EIO)
    text = refused(world, root)
    assert f"on 1 of {world.size} ranks" in text
    assert f"rank {world.size - 1} on " in text
    assert "Input/output error" in text


def test_what_a_killed_run_left_is_removed_once(world, root):
    if world.rank == 0:
        for rank in range(5):
            leftover(root, "dead", rank=rank, swap_bytes=1 << 16)
    world.comm.barrier()
    preflight(world.comm, world.node, root, 1 << 20, Options())
    assert list(root.iterdir()) == []
