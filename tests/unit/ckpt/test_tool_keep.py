"""`ckpt prune` and `latest`: what goes, what stays, what comes back."""

import datetime
import os
import shutil
import time

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint, TagNotFound
from mpispeed.ckpt.tools import keep, ls
from mpispeed.ckpt.tools.verify import verify
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.attacks import sign
from tests.unit.ckpt.sample import saved

ID = "0123456789abcdef" * 2
SMALL = {("w", "master"): torch.arange(5.0)}


def save(folder, *steps):
    for step in steps:
        saved(folder, f"s{step}", tensors=SMALL, state={"engine": {"global_steps": step}})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def in_the_future(path, days=40):
    """Let a checkpoint say that it was saved when a clock was ahead."""
    later = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    sign(path, created=later.isoformat(timespec="microseconds"))


def tags_of(folder):
    return [entry.tag for entry in tags.list_tags(folder) if entry.status == "ok"]


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


@pytest.mark.parametrize("latest", ["s2", "s11"])
def test_what_is_recoverable_neither_goes_nor_counts_as_kept(folder, latest):
    """Its tag is missing since a job died between two renames: it may be all there is of what `latest` names."""
    old = folder / f".s2.old-{ID}"
    (folder / "s2").rename(old)
    tags.write_latest(folder, latest, ID)
    entry = next(entry for entry in tags.list_tags(folder) if entry.path == old)
    assert (entry.status, entry.is_latest) == ("recoverable", latest == "s2")
    assert sorted(tags.retain(folder, 2)) == ["s3", "s4"]
    assert tags.resolve(folder, "s2") == (old, "s2")
    assert tags.resolve(folder, None)[1] == latest


def test_a_recoverable_copy_that_was_saved_last_takes_no_place(folder):
    (folder / "s11").rename(folder / f".s11.old-{ID}")
    assert sorted(tags.retain(folder, 2)) == ["s3"]


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


def keep_two(folder, step):
    saved(folder, f"s{step}", tensors=SMALL, state={"engine": {"global_steps": step}}, options=SaveOptions(keep_last=2))


def test_a_clock_that_was_ahead_once_keeps_no_old_tag(tmp_path, caplog):
    """By the clock, s3 and s6 would stay for ever, and every other tag would go as soon as the next is there."""
    save(tmp_path, 3, 6)
    for name in ("s3", "s6"):
        in_the_future(tmp_path / name)
    odd = [row["problem"] for row in ls.rows(tmp_path)]
    assert all("yet to come: a clock is or was wrong" in problem for problem in odd)
    keep_two(tmp_path, 10)
    assert "s6: it says that it was saved" in caplog.text
    assert tags_of(tmp_path) == ["s6", "s10"]
    keep_two(tmp_path, 20)
    assert tags_of(tmp_path) == ["s10", "s20"]
    save(tmp_path, 30)
    in_the_future(tmp_path / "s10")
    assert actions(keep.prune(tmp_path, keep_last=2)) == {"s10": "remove", "s20": "keep", "s30": "keep"}


def test_a_run_that_went_back_keeps_what_it_saves_now(tmp_path):
    """Whatever the clock says by now, too."""
    save(tmp_path, 10, 20, 30)
    for name in ("s10", "s20", "s30"):
        in_the_future(tmp_path / name)
    keep_two(tmp_path, 15)
    assert tags_of(tmp_path) == ["s15", "s30"]
    keep_two(tmp_path, 18)
    assert tags_of(tmp_path) == ["s15", "s18"]


def test_a_tag_that_is_saved_again_is_the_last(tmp_path):
    save(tmp_path, 1, 2, 3)
    saved(tmp_path, "s1", tensors=SMALL, options=SaveOptions(keep_last=1, overwrite=True))
    assert tags_of(tmp_path) == ["s1"]


def test_a_tag_that_is_a_link_goes_and_what_it_leads_to_stays(tmp_path):
    save(tmp_path / "away", 1)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "s1").symlink_to(tmp_path / "away" / "s1")
    save(tmp_path / "here", 2)
    (tmp_path / "here" / f".s0.tmp-{ID}").symlink_to(tmp_path / "away" / "s1")  # as an older version left it
    keep_two(tmp_path / "here", 3)
    assert tags_of(tmp_path / "here") == ["s2", "s3"]
    (tmp_path / "here" / "s1").symlink_to(tmp_path / "away" / "s1")
    age(tmp_path / "away" / "s1", 5)
    rows = keep.prune(tmp_path / "here", keep_last=1)
    assert actions(rows) == {"s1": "remove", "s2": "remove", "s3": "keep", f".s0.tmp-{ID}": "remove"}
    assert tags_of(tmp_path / "here") == ["s3"]
    assert verify(tmp_path / "away" / "s1", "s1").status == "ok"


def test_a_save_that_is_under_way_is_not_old_because_a_clock_was_ahead(folder):
    late = time.time() + 40 * 86400
    os.utime(folder / "s11" / schema.MANIFEST_FILE, (late, late))
    work = folder / f".s12.tmp-{ID}"
    work.mkdir()
    (work / schema.MODEL_FILE).touch()
    assert actions(keep.prune(folder))[work.name] == "keep"
    age(work, 2 * 3600)
    assert actions(keep.prune(folder))[work.name] == "remove"


def test_a_folder_that_cannot_be_removed_does_not_keep_the_others(folder, monkeypatch):
    def refuse(path, own=tags.remove):
        if path.name in ("s3", "s4"):
            raise PermissionError(13, "Permission denied", str(path))
        own(path)

    monkeypatch.setattr(tags, "remove", refuse)
    tags.write_latest(folder, "s11", ID)
    with pytest.raises(OSError, match=r"s3' \(and 1 more\)"):
        tags.retain(folder, 1)
    assert sorted(tags_of(folder)) == ["s11", "s3", "s4"]
