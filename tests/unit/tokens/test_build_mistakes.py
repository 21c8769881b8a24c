"""Mistakes and other people's files: nothing of theirs is removed, and nothing of a build is in the way of the next."""

import errno
import os

import numpy as np
import pytest

from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.sim import run
from mpispeed.tokens_build import job as jobs
from mpispeed.tokens_build.errors import BuildError
from mpispeed.tokens_build.inputs import Reading
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.work_folder import WorkFolder, folder_of
from tests.helpers.token_builds import alone, corpus, digest


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mistake_at_the_first_part_leaves_nothing_to_remove(tmp_path, ranks):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n')
    output = tmp_path / "s.h5"

    def wrong(world):
        with pytest.raises(BuildError, match="it has no 'txet'"):
            build(world.comm, Request(output, [path], "byte", reading=Reading(field="txet"), part_bytes=1 << 20))

    run(ranks, wrong)
    assert not folder_of(output).exists()
    assert build(solo_comm(), Request(output, [path], "byte")).tokens == 3


def killed_before_parts_went(tmp_path, monkeypatch):
    """A request whose store has its name, and whose parts are there still."""
    path, _ = corpus(tmp_path)
    request = Request(tmp_path / "s.h5", [path], "byte", part_bytes=4000)
    monkeypatch.setattr(WorkFolder, "remove", lambda _: None)
    alone(request)
    monkeypatch.undo()
    return request


def foreign(tmp_path, kind):
    """A file that is not of the build."""
    if kind == "text":
        (tmp_path / "foreign").write_text("precious")
    else:
        alone(Request(tmp_path / "foreign", [corpus(tmp_path, seed=2)[0]], "byte"))
    return tmp_path / "foreign"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("kind", ["text", "store"])
def test_a_file_made_while_a_store_is_built_stays(tmp_path, monkeypatch, links, kind):
    path, _ = corpus(tmp_path)
    request, other = Request(tmp_path / "s.h5", [path], "byte", part_bytes=4000), foreign(tmp_path, kind)
    before, link = digest(other), os.link

    def late(work, name):
        """The file comes at the last instant."""
        other.rename(name)
        if not links:
            raise OSError(errno.EPERM, "Operation not permitted")
        link(work, name)

    monkeypatch.setattr("os.link", late)
    with pytest.raises(BuildError, match=r"s\.h5 exists by now; the store that was built is .*s\.h5\.parts/store\.h5"):
        alone(request)
    monkeypatch.undo()
    assert digest(request.output) == before
    left = sorted(each.name for each in folder_of(request.output).iterdir())
    assert {"part-0000000", "store.h5"} < set(left)
    with pytest.raises(BuildError, match=r"s\.h5 exists, and is not the store that is built in .*; move it away, and"):
        run(2, lambda world: build(world.comm, request))
    assert digest(request.output) == before
    assert sorted(each.name for each in folder_of(request.output).iterdir()) == left
    request.output.rename(tmp_path / "moved")
    report = alone(request)
    assert report.kept == report.parts > 1
    assert digest(tmp_path / "moved") == before


@pytest.mark.parametrize("problem", [errno.EPERM, errno.EXDEV])
def test_file_systems_without_links(tmp_path, monkeypatch, problem):
    path, _ = corpus(tmp_path)

    def refusing(*_):
        raise OSError(problem, os.strerror(problem))

    alone(Request(tmp_path / "linked.h5", [path], "byte"))
    monkeypatch.setattr("os.link", refusing)
    request = killed_before_parts_went(tmp_path, monkeypatch)
    assert not WorkFolder(request.output).store.exists()
    assert digest(request.output) == digest(tmp_path / "linked.h5")
    assert not alone(request).is_new


def test_a_link_whose_reply_was_lost(tmp_path, monkeypatch):
    path, _ = corpus(tmp_path)
    link = os.link

    def twice(work, name):
        link(work, name)
        link(work, name)

    monkeypatch.setattr("os.link", twice)
    assert alone(Request(tmp_path / "s.h5", [path], "byte")).is_new
    assert not folder_of(tmp_path / "s.h5").exists()


@pytest.mark.parametrize("kind", ["text", "store", "cut", "dangling"])
def test_only_the_store_of_a_build_completes_it(tmp_path, monkeypatch, kind):
    request = killed_before_parts_went(tmp_path, monkeypatch)
    own, folder = request.output.read_bytes(), folder_of(request.output)
    left = {each.name for each in folder.iterdir()}
    request.output.unlink()
    if kind == "cut":
        request.output.write_bytes(own[:-1])
    elif kind == "dangling":
        request.output.symlink_to(tmp_path / "nothing")
    else:
        foreign(tmp_path, kind).rename(request.output)
    with pytest.raises(BuildError, match=r"s\.h5 exists, and is not the store that is built in"):
        alone(request)
    assert {each.name for each in folder.iterdir()} == left
    request.output.unlink()
    request.output.write_bytes(own)  # as after a copy
    assert not alone(request).is_new
    assert not folder.exists()
    assert request.output.read_bytes() == own


def test_a_folder_that_was_about_to_go_completes_its_own_store_only(tmp_path, monkeypatch):
    request = killed_before_parts_went(tmp_path, monkeypatch)
    folder, own = folder_of(request.output), request.output.read_bytes()
    for each in folder.iterdir():
        if each.name not in ("lock", "made.json"):
            each.unlink()
    request.output.write_text("foreign")
    with pytest.raises(BuildError, match="exists; remove it, or give another name"):
        alone(request)
    request.output.write_bytes(own)
    assert not alone(request).is_new
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(BuildError, match="exists; remove it, or give another name"):
        alone(request)
    assert not folder.exists()
    assert request.output.read_bytes() == own


def test_an_output_that_is_read_is_not_to_be_removed(tmp_path):
    path, _ = corpus(tmp_path)
    before = digest(path)
    with pytest.raises(BuildError, match=r"the output .*corpus1\.jsonl is one of the inputs; give another name"):
        alone(Request(path, [path], "byte"))
    assert digest(path) == before


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_both_files_of_a_pair_are_compared_when_an_import_goes_on(tmp_path, monkeypatch, ending):
    builder = MMapIndexedDatasetBuilder(tmp_path / "m.bin", np.int32)
    for number in range(300):
        builder.add_item_numpy(np.arange(number % 9 + 1))
        builder.end_document()
    builder.finalize(tmp_path / "m.idx")
    request = Request(tmp_path / "s.h5", [tmp_path / "m.bin"], None, vocabulary=100, part_bytes=1500)
    write, changed = jobs._write_part, tmp_path / f"m{ending}"
    before = changed.stat().st_mtime_ns

    def breaking(place, number, *others):
        if number == 2:
            raise OSError(28, "No space left on device")
        if number == 1:  # as a program that writes the pair again, of the same size
            os.utime(changed, ns=(before, before + 1_000_000_000))
        return write(place, number, *others)

    monkeypatch.setattr(jobs, "_write_part", breaking)
    with pytest.raises(BuildError, match=rf"m\{ending} has changed since the build began; leave its inputs alone"):
        alone(request)
    monkeypatch.undo()
    with pytest.raises(BuildError, match=rf"parts of another build: .*m\{ending} has changed since; build as before"):
        alone(request)
    os.utime(changed, ns=(before, before))
    assert alone(request).kept == 1
    (tmp_path / f"m{ending}").unlink()
    with pytest.raises(BuildError, match=rf"m\{ending} cannot be read: No such file"):
        alone(Request(tmp_path / "t.h5", [tmp_path / "m.idx"], None))


def test_an_output_that_is_a_file_of_a_pair(tmp_path):
    builder = MMapIndexedDatasetBuilder(tmp_path / "m.bin", np.int32)
    builder.add_item_numpy(np.arange(9))
    builder.finalize(tmp_path / "m.idx")
    for path in (tmp_path / "m.bin", tmp_path / "m.idx"):
        with pytest.raises(BuildError, match=f"the output .*{path.name} is one of the inputs; give another name"):
            alone(Request(path, [tmp_path / "m"], None))
