"""After a run that was killed the next one removes its swap folders, and nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from mpispeed.store import owner, private_folder
from mpispeed.store.mounts import Mount
from mpispeed.store.private_folder import FOREIGN_SECONDS, UNFINISHED_SECONDS, run_name
from mpispeed.store.swap import SWAP, SwapFolder, clean_stale
from tests.helpers.swap import ROOT, leftover

HOLD = """
import os, sys, time
from pathlib import Path
from mpispeed.store.swap import SwapFolder
folder = SwapFolder(Path(sys.argv[1]), "r", 0)
folder.file("a", 1 << 20)
child = os.fork() if sys.argv[2] == "fork" else -1
if child:
    print(child, flush=True)
time.sleep(60)
"""


def aged(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_the_folder_of_a_killed_process_goes_and_not_before(tmp_path, how):
    """A forked child that outlives its parent does not keep the folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path, how], stdout=subprocess.PIPE, text=True, env=env)
    try:
        child = int(process.stdout.readline())
        path = tmp_path / SWAP.parent_name / "r.rank0"
        assert clean_stale(tmp_path) == []
        assert (path / "a.swap").stat().st_size == 1 << 20
        process.send_signal(signal.SIGKILL)
        process.wait()
        if how == "fork":
            os.kill(child, 0)
        assert clean_stale(tmp_path) == [str(path)]
        assert list(tmp_path.iterdir()) == []
    finally:
        if how == "fork":
            os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_only_the_dead_go(tmp_path):
    dead, live = leftover(tmp_path, "dead"), SwapFolder(tmp_path, "live", 0)
    assert clean_stale(tmp_path) == [str(dead)]
    assert live.path.exists()
    live.remove()
    assert list(tmp_path.iterdir()) == []


def as_link_to_folder(folder):
    shutil.move(folder, folder.parent.parent / "victim")
    folder.symlink_to(folder.parent.parent / "victim")


def with_link(folder):
    (folder.parent.parent / "victim").write_text("precious")
    (folder / "b.swap").symlink_to(folder.parent.parent / "victim")


def with_owner_link(folder):
    real = folder.parent.parent / "owner.json"
    (folder / owner.OWNER_FILE).rename(real)
    (folder / owner.OWNER_FILE).symlink_to(real)


def with_second_name(folder):
    os.link(folder / owner.OWNER_FILE, folder.parent.parent / "second")


def with_pipe(folder):
    (folder / owner.OWNER_FILE).unlink()
    os.mkfifo(folder / owner.OWNER_FILE)
    aged(folder, 10 * UNFINISHED_SECONDS)


def without_owner(folder):
    (folder / owner.OWNER_FILE).unlink()
    aged(folder, 10 * UNFINISHED_SECONDS)


def with_other_text(folder):
    (folder / owner.OWNER_FILE).write_text('["host"]')
    aged(folder / owner.OWNER_FILE, 10 * UNFINISHED_SECONDS)


ODD = {
    "link": as_link_to_folder,
    "link inside": with_link,
    "owner is a link": with_owner_link,
    "owner has two names": with_second_name,
    "owner is a pipe": with_pipe,
    "no owner": without_owner,
    "owner says nothing": with_other_text,
    "strange file": lambda folder: (folder / "thesis.tex").write_text("x"),
    "strange swap name": lambda folder: (folder / "a b.swap").write_text("x"),
    "folder inside": lambda folder: (folder / "b.swap").mkdir(),
    "strange name": lambda folder: folder.rename(folder.with_name("rank0")),
    "hidden": lambda folder: folder.rename(folder.with_name(".r.rank0")),
    "backup": lambda folder: folder.rename(folder.with_name("r.rank0~")),
}


@pytest.mark.parametrize("case", ODD)
def test_what_does_not_look_exactly_like_ours_stays(tmp_path, case):
    ODD[case](leftover(tmp_path, "r"))
    before = sorted(tmp_path.rglob("*"))
    assert clean_stale(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_of_another_user_stay(tmp_path, monkeypatch):
    leftover(tmp_path)
    user = os.geteuid()
    (tmp_path / SWAP.parent_name).rename(tmp_path / f"mpispeed-swap-{user + 1}")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert clean_stale(tmp_path) == []
    monkeypatch.undo()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("changes", [{"host": "elsewhere"}, {"is_locked": False}])
def test_what_cannot_be_judged_from_here_stays_and_is_named_when_old(tmp_path, caplog, changes):
    folder = leftover(tmp_path, **changes)
    assert clean_stale(tmp_path) == []
    assert caplog.text == ""
    aged(folder / owner.OWNER_FILE, FOREIGN_SECONDS + 60)
    assert clean_stale(tmp_path) == []
    assert str(folder) in caplog.text
    assert (folder / "a.swap").exists()


@pytest.mark.parametrize(("kind", "goes"), [("nfs4", False), ("ext4", True)])
def test_a_node_of_the_same_name_started_since(tmp_path, monkeypatch, kind, goes):
    """On a local disk it was restarted; in the network it may be another node."""
    folder = leftover(tmp_path, boot="another")
    monkeypatch.setattr(private_folder, "mount_of", lambda _: Mount("/", kind, "x"))
    assert clean_stale(tmp_path) == ([str(folder)] if goes else [])


@pytest.mark.parametrize("has_owner", [False, True])
def test_a_folder_being_made_is_left_until_it_is_old(tmp_path, has_owner):
    folder = leftover(tmp_path)
    for path in folder.iterdir():
        path.unlink()
    if has_owner:
        (folder / owner.OWNER_FILE).touch(mode=0o600)
    assert clean_stale(tmp_path) == []
    aged(folder / owner.OWNER_FILE if has_owner else folder, UNFINISHED_SECONDS + 60)
    assert clean_stale(tmp_path) == [str(folder)]


def test_the_probe_of_a_killed_process_goes_too(tmp_path):
    folder = leftover(tmp_path)
    (folder / ".mpispeed-probe-a1_b2c3d").write_bytes(b"")
    assert clean_stale(tmp_path) == [str(folder)]


def test_many_clean_at_once(tmp_path):
    """Through different names of one root, too."""
    folders = {leftover(tmp_path, run_name(), rank=rank).name for rank in range(100)}
    (tmp_path / "alias").symlink_to(tmp_path)
    roots = [tmp_path, tmp_path / "alias", tmp_path, tmp_path / "alias"]
    removed = []
    threads = [threading.Thread(target=lambda root=root: removed.append(clean_stale(root))) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [path.rpartition("/")[2] for paths in removed for path in paths]
    assert sorted(names) == sorted(folders)
    assert [path.name for path in tmp_path.iterdir()] == ["alias"]
