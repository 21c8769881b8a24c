"""`ckpt prune` and `latest`: what goes, what stays, what comes back."""

import os
import shutil
import time

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import schema, tags
from mpispeed.ckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint, TagNotFound
from mpispeed.ckpt.tools import keep
from tests.unit.ckpt.sample import saved

ID = "0123456789abcdef" * 2
SMALL = {("w", "master"): torch.arange(5.0)}


def save(folder, *steps):
    for step in steps:
        saved(folder, f"s{step}", tensors=SMALL, state={"engine": {"global_steps": step}})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def actions(rows):
    return {row["folder"]: row["action"] for row in rows}


def age(path, seconds):
    """Make a folder look as if it had last changed so many seconds ago."""
    then = time.time() - seconds
    for found in (*path.rglob("*"), path):
        os.utime(found, (then, then))


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    where = tmp_path_factory.mktemp("five")
    save(where, 2, 3, 4, 10, 11)
    tags.write_latest(where, "s2", ID)
    return where


@pytest.fixture
def folder(five, tmp_path):
    return shutil.copytree(five, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(("last", "every"), [(1, 0), (2, 0), (2, 3), (1, 2), (9, 0)])
def test_what_stays_is_what_retention_keeps(folder, last, every):
    before = names(folder)
    beyond = {entry.tag for entry in tags.beyond(tags.list_tags(folder), last, every)}
    planned = keep.prune(folder, keep_last=last, keep_every=every, dry_run=True)
    assert names(folder) == before
    assert {tag for tag, action in actions(planned).items() if action == "remove"} == beyond
    assert keep.prune(folder, keep_last=last, keep_every=every) == planned
    assert names(folder) == [name for name in before if name not in beyond]


def test_without_numbers_tags_stay(folder):
    keep.prune(folder)
    assert names(folder) == ["latest", "s10", "s11", "s2", "s3", "s4"]
    for last, every in ((0, 5), (-1, 0)):
        with pytest.raises(CheckpointError, match="keep at least 1"):
            keep.prune(folder, keep_last=last, keep_every=every)
    with pytest.raises(TagNotFound, match="no folder"):
        keep.prune(folder / "none")


def test_leftovers_go_when_they_are_older_than_the_newest_tag(folder):
    old, young, replaced = folder / f".s5.tmp-{ID}", folder / f".s12.tmp-{ID}", folder / f".s11.old-{ID}"
    shutil.copytree(folder / "s3", old)
    (old / schema.MANIFEST_FILE).unlink()
    shutil.copytree(folder / "s3", replaced)
    age(old, 60)
    age(replaced, 60)
    young.mkdir()
    (folder / "notes").mkdir()
    assert actions(keep.prune(folder)) == {
        **{f"s{step}": "keep" for step in (2, 3, 4, 10, 11)},
        old.name: "remove",
        replaced.name: "remove",
        young.name: "keep",
    }
    assert names(folder) == sorted(["latest", "notes", "s10", "s11", "s2", "s3", "s4", young.name])
    # a save that is under way began long ago, but writes
    age(young, 60)
    (young / schema.MODEL_FILE).write_bytes(b"x")
    keep.prune(folder)
    assert young.exists()
    age(young, 60)
    keep.prune(folder)
    assert not young.exists()


def test_without_a_complete_tag_nothing_goes(tmp_path):
    (tmp_path / f".s5.tmp-{ID}").mkdir()
    age(tmp_path / f".s5.tmp-{ID}", 60)
    keep.prune(tmp_path, keep_last=1)
    assert names(tmp_path) == [f".s5.tmp-{ID}"]


def test_an_interrupted_overwrite_is_recovered(folder):
    old = folder / f".s10.old-{ID}"
    (folder / "s10").rename(old)
    age(old, 60)
    assert actions(keep.prune(folder, keep_last=1))[old.name] == "keep"
    assert old.exists()
    planned = keep.prune(folder, recover=True, keep_last=1, dry_run=True)
    assert actions(planned) == {"s2": "keep", "s11": "keep", old.name: "recover"}
    assert keep.prune(folder, recover=True, keep_last=1) == planned
    assert names(folder) == ["latest", "s10", "s11", "s2"]
    assert {entry.tag: entry.status for entry in tags.list_tags(folder)} == {"s2": "ok", "s10": "ok", "s11": "ok"}


def test_a_damaged_old_copy_is_not_recovered(folder):
    old = folder / f".s10.old-{ID}"
    (folder / "s10").rename(old)
    (old / schema.MODEL_FILE).write_bytes(b"")
    assert actions(keep.prune(folder, recover=True))[old.name] == "keep"
    age(old, 60)
    assert actions(keep.prune(folder, recover=True))[old.name] == "remove"


def test_latest(folder):
    assert keep.latest(folder) == "s2"
    keep.set_latest(folder, "s10")
    assert keep.latest(folder) == tags.read_latest(folder) == "s10"
    for tag, error in (("s99", TagNotFound), ("../s10", CheckpointError), ("latest", CheckpointError)):
        with pytest.raises(error):
            keep.set_latest(folder, tag)
    (folder / "s4" / schema.MODEL_FILE).write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        keep.set_latest(folder, "s4")
    (folder / "s3" / schema.MANIFEST_FILE).unlink()
    with pytest.raises(IncompleteCheckpoint):
        keep.set_latest(folder, "s3")
    (folder / "s11").rename(folder / f".s11.old-{ID}")
    with pytest.raises(CheckpointError, match="prune --recover"):
        keep.set_latest(folder, "s11")
    assert tags.read_latest(folder) == "s10"
    shutil.rmtree(folder / "s10")
    with pytest.raises(TagNotFound):
        keep.latest(folder)
    (folder / schema.LATEST_FILE).unlink()
    with pytest.raises(NoCheckpoint, match="--set"):
        keep.latest(folder)
