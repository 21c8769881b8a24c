"""Swap folders are private, are never somebody else's, and go with their process."""

import fcntl
import gc
import json
import os
import resource
import socket
import stat
import threading

import pytest
import torch

from mpispeed.base.errors import StoreError
from mpispeed.native.block_io import BlockIO
from mpispeed.store import owner
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SWAP, SwapFolder, clean_stale
from tests.helpers.swap import python, python_on_tmpfs, without_rights


@pytest.fixture
def folder(tmp_path):
    made = SwapFolder(tmp_path, run_name(), 0)
    yield made
    made.remove()


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_private_and_names_its_owner(folder, tmp_path):
    assert folder.path.parent == tmp_path / SWAP.parent_name
    assert (mode(folder.path.parent), mode(folder.path)) == (0o700, 0o700)
    file = folder.file("masters.0", 1 << 20)
    assert file.size() == 1 << 20
    status = (folder.path / "masters.0.swap").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_blocks * 512 >= 1 << 20) == (0o600, True)
    said = json.loads((folder.path / owner.OWNER_FILE).read_text())
    assert (said["host"], said["pid"], said["user"]) == (socket.gethostname(), os.getpid(), os.geteuid())
    assert said["is_locked"]


def test_the_owner_holds_a_lock(folder):
    with (folder.path / owner.OWNER_FILE).open() as again, pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_bytes_go_through_a_file(folder):
    file = folder.file("x", 5000)
    data, back = torch.arange(5000).to(torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    with BlockIO() as io:
        io.write(file, data).wait()
        io.read(file, back).wait()
    assert torch.equal(back, data)


def test_unreserved_files_take_no_space(folder):
    file = folder.file("x", 1 << 20, reserve=False)
    assert file.size() == 0
    assert folder.file("empty", 0).size() == 0


def test_removing_leaves_nothing_and_may_be_repeated(folder, tmp_path):
    file = folder.file("x", 100)
    other = SwapFolder(tmp_path, run_name(), 1)
    folder.remove()
    folder.remove()
    assert not folder.path.exists()
    assert other.path.exists()
    with pytest.raises(OSError, match="closed"):
        file.size()
    with pytest.raises(StoreError, match="removed"):
        folder.file("y", 1)
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_nobody_holds_is_removed(tmp_path):
    made = SwapFolder(tmp_path, run_name(), 0)
    made.file("x", 100)
    del made
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_others_put_there_stays(folder, caplog):
    (folder.path / "mine").write_text("x")
    folder.remove()
    assert [path.name for path in folder.path.iterdir()] == ["mine"]
    assert "by hand" in caplog.text


def test_an_existing_folder_is_never_used(folder, tmp_path):
    run, rank = folder.path.name.rsplit(".rank", 1)
    with pytest.raises(StoreError, match="File exists"):
        SwapFolder(tmp_path, run, int(rank))
    assert folder.file("x", 1).size() == 1


def test_two_engines_of_one_process(tmp_path):
    one, two = (SwapFolder(tmp_path, run_name(), 0) for _ in range(2))
    assert one.path != two.path
    one.file("x", 10), two.file("x", 10)
    assert clean_stale(tmp_path) == []
    one.remove()
    assert (two.path / "x.swap").exists()
    two.remove()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", ".hidden", "a b", "a\n", "a\0", "ä", "-x", "x" * 201])
def test_odd_names_are_refused(folder, tmp_path, name):
    with pytest.raises(StoreError, match="letters, digits"):
        folder.file(name, 1)
    with pytest.raises(StoreError, match="letters, digits"):
        SwapFolder(tmp_path, name, 0)
    assert [path.name for path in folder.path.iterdir()] == [owner.OWNER_FILE]


def test_a_file_is_made_once(folder):
    folder.file("x", 10)
    with pytest.raises(StoreError, match=r"x\.swap cannot be made: File exists.*its own name"):
        folder.file("x", 10)


def test_a_planted_link_is_not_followed_to_a_file(folder, tmp_path):
    (tmp_path / "victim").write_text("precious")
    (folder.path / "x.swap").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match=r"x\.swap cannot be made"):
        folder.file("x", 10)
    assert (tmp_path / "victim").read_text() == "precious"
    (folder.path / "x.swap").unlink()


def test_a_planted_parent_is_refused(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / SWAP.parent_name).symlink_to("victim")
    with pytest.raises(StoreError, match="cannot be made"):
        SwapFolder(tmp_path, run_name(), 0)
    assert clean_stale(tmp_path) == []
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_planted_rank_folder_is_refused(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / SWAP.parent_name).mkdir(mode=0o700)
    (tmp_path / SWAP.parent_name / "r.rank0").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError, match="cannot be made"):
        SwapFolder(tmp_path, "r", 0)
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_parent_that_others_may_write_is_refused(tmp_path):
    parent = tmp_path / SWAP.parent_name
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(StoreError, match="may be written by others"):
        SwapFolder(tmp_path, run_name(), 0)
    assert list(parent.iterdir()) == []


def test_a_parent_of_another_user_is_refused(tmp_path, monkeypatch):
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreError, match="belongs to another user"):
        SwapFolder(tmp_path, run_name(), 0)


def test_a_folder_replaced_behind_our_back(folder):
    moved = folder.path.with_name("moved")
    folder.path.rename(moved)
    folder.path.mkdir()
    with pytest.raises(StoreError, match="removed or replaced"):
        folder.file("x", 10)
    assert list(folder.path.iterdir()) == []
    folder.path.rmdir()
    moved.rename(folder.path)


@pytest.mark.parametrize(
    ("name", "words"), [("missing", "make it"), ("file", "make it"), ("nul\0", "null byte"), ("x" * 300, "too long")]
)
def test_roots_that_are_no_folders(tmp_path, name, words):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match=words):
        SwapFolder(tmp_path / name, run_name(), 0)
    assert clean_stale(tmp_path / name) == []


def test_a_root_without_the_right_to_write():
    with without_rights() as root, pytest.raises(StoreError, match=r"Permission denied.*nvme_path"):
        SwapFolder(root, run_name(), 0)


def test_a_root_that_all_may_write(tmp_path):
    tmp_path.chmod(0o1777)
    made = SwapFolder(tmp_path, run_name(), 0)
    assert mode(made.path.parent) == 0o700
    made.remove()


def test_a_limit_on_file_length(folder):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            StoreError, match=r"File too large; wanted 2 MiB \(2097152 bytes\), free .* bytes\); .*ulimit"
        ):
            folder.file("x", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (folder.path / "x.swap").exists()
    folder.file("x", 2 << 20)


FULL = """
import sys
from pathlib import Path
from mpispeed.base.errors import StoreError
from mpispeed.store.swap import SwapFolder
root = Path(sys.argv[1])
folder = SwapFolder(root, "r", 3)
folder.file("a", 3 << 20)
try:
    folder.file("b", 8 << 20)
except StoreError as error:
    print(error)
print(sorted(path.name for path in folder.path.iterdir()))
folder.file("b", 100)
folder.remove()
print(list(root.iterdir()))
"""


def test_a_full_disk(tmp_path):
    done = python_on_tmpfs(FULL, "8m", tmp_path)
    assert done.returncode == 0, done.stderr
    error, names, left = done.stdout.splitlines()
    path = tmp_path / SWAP.parent_name / "r.rank3" / "b.swap"
    assert error.startswith(f"swap file {path} cannot be made: ")
    assert "No space left on device" in error
    assert "wanted 8 MiB (8388608 bytes), free " in error
    assert (names, left) == ("['a.swap', 'owner.json']", "[]")


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from mpispeed.base.errors import StoreError
from mpispeed.store.swap import SwapFolder, clean_stale
root = Path(sys.argv[1])
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
try:
    SwapFolder(root, "r", 0)
except StoreError as error:
    print(error)
print(clean_stale(root))
"""


def test_a_read_only_disk(tmp_path):
    done = python_on_tmpfs(READ_ONLY, "8m", tmp_path)
    assert done.returncode == 0, done.stderr
    error, removed = done.stdout.splitlines()
    assert "Read-only file system" in error
    assert removed == "[]"


LEAVE = """
import sys
from pathlib import Path
from mpispeed.store.swap import SwapFolder
folder = SwapFolder(Path(sys.argv[1]), "r", 0)
file = folder.file("a", 4096)
print(folder.path.exists())
if sys.argv[2] == "raise":
    raise SystemExit("failed")
"""


@pytest.mark.parametrize("how", ["end", "raise"])
def test_the_end_of_a_process_removes_its_folder(tmp_path, how):
    done = python(LEAVE, tmp_path, how)
    assert (done.stdout, done.returncode) == ("True\n", int(how == "raise")), done.stderr
    assert list(tmp_path.iterdir()) == []


FORK = """
import os, sys
from pathlib import Path
import torch
from mpispeed.base.errors import StoreError
from mpispeed.native import block_io
from mpispeed.store.swap import SwapFolder
folder = SwapFolder(Path(sys.argv[1]), "r", 0)
io = block_io.BlockIO()
block_io.inject_latency(0.2)
transfer = io.write(folder.file("a", 4096), torch.zeros(4096, dtype=torch.uint8))
if os.fork() == 0:
    try:
        folder.file("b", 10)
    except StoreError as error:
        print(error)
    folder.remove()
    sys.exit(3)  # by way of what runs at exit
print(os.waitstatus_to_exitcode(os.wait()[1]), sorted(path.name for path in folder.path.iterdir()))
"""


def test_a_forked_process_leaves_the_folder_alone(tmp_path):
    done = python(FORK, tmp_path)
    refusal, seen = done.stdout.splitlines()
    assert "forked off its owner" in refusal
    assert seen == "3 ['a.swap', 'owner.json']", done.stderr
    assert list(tmp_path.iterdir()) == []


def test_folders_come_and_go_while_others_clean(tmp_path):
    """The parent is made and removed all the time."""
    failures, is_over = [], threading.Event()

    def live():
        try:
            for turn in range(60):
                made = SwapFolder(tmp_path, run_name(), turn)
                made.file("x", 100)
                assert (made.path / "x.swap").exists()
                made.remove()
        except Exception as failure:
            failures.append(failure)

    def clean():
        while not is_over.is_set():
            failures.extend(clean_stale(tmp_path))

    cleaner = threading.Thread(target=clean)
    makers = [threading.Thread(target=live) for _ in range(3)]
    for thread in (cleaner, *makers):
        thread.start()
    for thread in makers:
        thread.join()
    is_over.set()
    cleaner.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []
