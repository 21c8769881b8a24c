"""A tag that is saved again: the old one can be read until the new one takes its place, by whoever looks when."""

import ctypes
import errno
import itertools
import multiprocessing

import pytest
import torch

from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.tags import exchange
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.sample import saved

SAVES = 25


def save(folder, number):
    tensors = {("w", "master"): torch.full((50,), float(number))}
    state = {"engine": {"global_steps": number}}
    saved(folder, "only", tensors=tensors, state=state, options=SaveOptions(overwrite=True))


def look(folder, has_looked, is_over, answers):
    """Open the tag again and again, before, while and after it is saved; every time it has to be there, whole."""
    seen, problem, is_last = [], "", False
    try:
        while not is_last:
            is_last = is_over.is_set()
            with open_checkpoint(folder, "only") as checkpoint:
                seen.append(checkpoint.global_step)
            has_looked.set()
    except Exception as failure:  # whatever it is, the test tells
        problem = f"{type(failure).__name__}: {failure}"
    answers.put((seen, problem))


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "by two names"])
def test_a_tag_can_be_opened_at_every_moment_of_its_overwriting(tmp_path, monkeypatch, at_once):
    if not at_once:
        monkeypatch.setattr(tags, "exchange", lambda *_: False)
    save(tmp_path, 0)
    context = multiprocessing.get_context("fork")
    has_looked, is_over, answers = context.Event(), context.Event(), context.Queue()
    reader = context.Process(target=look, args=(tmp_path, has_looked, is_over, answers))
    reader.start()
    try:
        has_looked.wait(60)
        for number in range(1, SAVES):
            save(tmp_path, number)
    finally:
        is_over.set()
    seen, problem = answers.get(timeout=60)
    reader.join(60)
    assert problem == ""
    assert (seen[0], seen[-1]) == (0, SAVES - 1)
    assert all(one <= other for one, other in itertools.pairwise(seen))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["only"]


def test_a_tag_whose_old_copy_goes_between_two_looks(tmp_path, monkeypatch):
    save(tmp_path, 0)
    answers = [(tmp_path / f".only.old-{'0' * 32}", "only")]
    resolve = tags.resolve
    monkeypatch.setattr(tags, "resolve", lambda *place: answers.pop() if answers else resolve(*place))
    with open_checkpoint(tmp_path, "only") as checkpoint:
        assert checkpoint.path == tmp_path / "only"


def test_folders_change_places(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if exchange(tmp_path / "a", tmp_path / "b"):
        assert (tmp_path / "b" / "x").is_file()
        with pytest.raises(FileNotFoundError):
            exchange(tmp_path / "a", tmp_path / "c")
    else:  # the file system cannot; nothing has changed
        assert (tmp_path / "a" / "x").is_file()


def test_what_was_replaced_is_left_over_whichever_of_its_files_are_gone(tmp_path, monkeypatch):
    save(tmp_path, 0)
    names = sorted(path.name for path in (tmp_path / "only").iterdir())
    for name in names:
        with monkeypatch.context() as patch:
            patch.setattr(
                tags.shutil, "rmtree", lambda path, name=name, **_: (path / name).unlink()
            )  # then it is killed
            save(tmp_path, 1)
    entries = tags.list_tags(tmp_path)
    assert sorted(entry.status for entry in entries) == ["ok", *["partial"] * len(names)]
    tags.retain(tmp_path, 1)
    assert [entry.tag for entry in tags.list_tags(tmp_path) if entry.status == "ok"] == ["only"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refused_exchange_is_done_by_two_names(tmp_path, monkeypatch, number):
    def call(*_):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr("mpispeed.ckpt.format.tags._renameat2", lambda: call)
    save(tmp_path, 0)
    save(tmp_path, 1)
    with open_checkpoint(tmp_path, "only") as checkpoint:
        assert checkpoint.global_step == 1


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "by two names"])
def test_a_tag_that_another_job_removes_while_it_is_replaced(tmp_path, monkeypatch, at_once):
    def without(work, final):
        tags.shutil.rmtree(final)
        return exchange(work, final) if at_once else False

    save(tmp_path, 0)
    monkeypatch.setattr(tags, "exchange", without)
    save(tmp_path, 1)
    with open_checkpoint(tmp_path, "only") as checkpoint:
        assert checkpoint.global_step == 1
