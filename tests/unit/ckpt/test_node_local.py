"""A whole checkpoint on every node's own disk. Nodes are ranks, which are threads, with folders of their own."""

import shutil
from dataclasses import replace

import pytest
import torch

from mpispeed.base.errors import CheckpointError, MpispeedError
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import NoCheckpoint, SaveFailed, TagNotFound
from mpispeed.ckpt.node_local import copies, fetch
from mpispeed.ckpt.node_local.fetch import find_on_nodes
from mpispeed.ckpt.read.reader import Checkpoint, open_checkpoint
from mpispeed.ckpt.write import two_phase, work_folder
from mpispeed.ckpt.write.save import SaveOptions, save
from tests.unit.ckpt.sample import STATE, cut, outcomes, params_of, saved, tensors_of
from tests.zoo import has_same_bits

LOCAL = SaveOptions(node_local=True, window_bytes=4 << 20)
FIRST, SECOND = tensors_of(0), tensors_of(1)


def save_on(folders, tag="step7", tensors=FIRST, **changes):
    """Save by one rank per folder; gives their reports or errors."""
    options = {name: getattr(LOCAL, name) for name in LOCAL.__slots__} | changes

    def work(comm):
        pieces = cut(tensors, comm.rank, comm.size)
        folder, made = folders[comm.rank], SaveOptions(**options)
        return save(comm, folder, tag, params=params_of(tensors), tensors=pieces, state=STATE, options=made)

    return outcomes(len(folders), work)


def load_on(folders, tag=None):
    """What each rank finds, or its error."""
    return outcomes(len(folders), lambda comm: find_on_nodes(comm, folders[comm.rank], tag))


def check(opened, tensors=FIRST):
    with Checkpoint(opened) as checkpoint:
        assert all(has_same_bits(checkpoint.read_whole(*key), value) for key, value in tensors.items())
        assert checkpoint.state()["engine"] == STATE["engine"]


def bytes_in(path):
    return {file.relative_to(path): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture
def folders(tmp_path):
    return [tmp_path / f"node{number}" for number in range(3)]


@pytest.fixture
def of_five(tmp_path):
    """Folders of five ranks on three nodes, in an order that is not that of the nodes."""
    return [tmp_path / f"node{number}" for number in (0, 1, 0, 2, 1)]


@pytest.mark.parametrize("files", [0, 3])
@pytest.mark.parametrize("round_bytes", [1 << 16, 8 << 20])
def test_every_node_gets_all_of_it(of_five, tmp_path, files, round_bytes, monkeypatch):
    monkeypatch.setattr(copies, "_ROUND_BYTES", round_bytes)
    for folder in of_five:
        folder.mkdir(exist_ok=True)
    reports = save_on(of_five, files=files)
    assert [report.path for report in reports] == [folder / "step7" for folder in of_five]
    assert {(report.files, report.is_direct) for report in reports} == {(files or 1, False)}
    first, *others = (bytes_in(tmp_path / f"node{number}") for number in range(3))
    assert len(first) == (4 if files == 0 else 7)
    for other in others:
        assert other == first
    # the same files as those of one rank in one folder, but for what tells when and by how many they were saved
    plain = bytes_in(saved(tmp_path / "shared", options=SaveOptions(files=files)))
    names = [name for name in plain if name.name not in ("manifest.json", "state.h5")]
    assert names
    assert all(first["step7" / name] == plain[name] for name in names)
    for opened, folder in zip(load_on(of_five), of_five, strict=True):
        assert opened.path == folder / "step7"
        check(opened)


def test_one_node_writes_as_ever(tmp_path):
    reports = save_on([tmp_path] * 3)
    assert [(report.is_direct, report.files) for report in reports] == [(True, 1)] * 3
    check(load_on([tmp_path] * 2)[1])


def test_nodes_that_share_the_folder_after_all_keep_one(tmp_path):
    """Two names of one folder, as two nodes see it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "same").symlink_to(tmp_path / "disk")
    assert [report.tag for report in save_on([tmp_path / "disk", tmp_path / "same"])] == ["step7"] * 2
    # and two that share another one, which is not that of rank 0
    shutil.rmtree(tmp_path / "disk" / "step7")
    folders = [tmp_path / "own", tmp_path / "disk", tmp_path / "same"]
    save_on(folders)
    for opened in load_on(folders):
        check(opened)
    shutil.rmtree(tmp_path / "disk" / "step7")
    for opened in load_on(folders):
        check(opened)
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["latest", "step7"]


def test_a_node_that_lost_its_disk_gets_a_copy(folders):
    save_on(folders, "step7")
    shutil.rmtree(folders[0])
    for opened in load_on(folders):
        check(opened)
    assert bytes_in(folders[0]) == bytes_in(folders[1])
    assert tags.read_latest(folders[0]) == "step7"


def test_a_tag_that_is_asked_for_is_copied_too_and_latest_is_left(folders):
    save_on(folders, "step7")
    save_on(folders, "step8", SECOND)
    shutil.rmtree(folders[1] / "step7")
    for opened in load_on(folders, "step7"):
        check(opened)
    assert bytes_in(folders[1]) == bytes_in(folders[2])
    assert tags.read_latest(folders[1]) == "step8"


def test_a_job_that_was_killed_while_it_wrote_latest(folders):
    """All have the tag; one has the next `latest` only as the temporary file of that save."""
    save_on(folders, "step7")
    save_on(folders, "step8", SECOND)
    for path in folders:
        manifest_later(path / "step8")
    uuid = manifests.read(folders[0] / "step8").uuid
    (folders[0] / "latest").rename(folders[0] / f".latest.tmp-{uuid}")
    tags.write_latest(folders[0], "step7", "0" * 32)
    for opened in load_on(folders):
        check(opened, SECOND)
    assert [tags.read_latest(folder) for folder in folders] == ["step8"] * 3


def test_more_nodes_and_fewer(folders):
    save_on(folders[:2])
    for opened in load_on(folders):
        check(opened)
    check(load_on([folders[2]])[0])


def test_nothing_is_nothing_on_all(folders):
    for failure in load_on(folders):
        assert isinstance(failure, NoCheckpoint)
    save_on(folders[:1])
    results = load_on(folders, "other")
    assert len({str(failure) for failure in results}) == 1
    assert all(isinstance(failure, TagNotFound) and "step7" in str(failure) for failure in results)
    shutil.rmtree(folders[0] / "step7")
    assert all(isinstance(failure, TagNotFound) for failure in load_on(folders))
    assert not [path for folder in folders for path in folder.glob(".*")]


def test_the_newest_of_what_latest_names(folders):
    """A node that was away while the others went on."""
    save_on(folders, "step7")
    shutil.copytree(folders[0], folders[0].parent / "away")
    save_on(folders, "step8", SECOND)
    for path in folders:
        manifest_later(path / "step8")
    shutil.rmtree(folders[0])
    (folders[0].parent / "away").rename(folders[0])
    for opened in load_on(folders):
        assert opened.tag == "step8"
        check(opened, SECOND)
    assert tags.read_latest(folders[0]) == "step8"


def manifest_later(path, created="2999-01-01T00:00:00+00:00"):
    """Saved at another time."""
    known = manifests.read(path)
    (path / "manifest.json").unlink()
    manifests.write(path, replace(known, created=created))


def test_different_checkpoints_of_one_name_are_refused(folders):
    save_on(folders[:1], "step7")
    save_on(folders[1:], "step7", SECOND)
    results = load_on(folders)
    (text,) = {str(failure) for failure in results}
    assert "different checkpoints under the tag 'step7'" in text
    assert str(folders[0]) in text
    assert str(folders[1]) in text
    check(load_on(folders[:1])[0])
    check(load_on(folders[1:])[0], SECOND)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_damaged_copy_is_named_on_all(folders, victim):
    save_on(folders)
    path = folders[victim] / "step7" / "model.h5"
    content = bytearray(path.read_bytes())
    path.write_bytes(content[:-1])
    results = load_on(folders)
    assert {type(failure) for failure in results} == {CheckpointError}
    assert all(str(path) in str(failure) and "truncated" in str(failure) for failure in results)
    content[9] ^= 1
    path.write_bytes(content)
    assert all(str(path) in str(failure) for failure in load_on(folders))
    # without it a copy takes its place
    shutil.rmtree(path.parent)
    for opened in load_on(folders):
        check(opened)


def test_a_source_with_altered_elements_is_not_spread(folders):
    save_on(folders[:1])
    with open_checkpoint(folders[0]) as checkpoint:
        place = checkpoint.stored("embed.weight", "master").offset
    with (folders[0] / "step7" / "model.h5").open("r+b") as file:
        file.seek(place)
        file.write(b"oops")
    results = load_on(folders)
    assert all("is not what was saved" in str(failure) for failure in results)
    assert not [path for folder in folders[1:] for path in folder.iterdir()]


def test_a_save_that_ended_between_its_nodes_is_completed(folders, monkeypatch):
    """The copies are whole; the job ends when only one node has published, a new tag or over an old one."""
    save_on(folders, "step7")
    for tag, overwrite, tensors in (("step8", False, SECOND), ("step7", True, SECOND)):
        real = tags.publish

        def publish(work, final, uuid, real=real, **more):
            if final.parent == folders[1]:
                real(work, final, uuid, **more)
            else:
                shutil.copytree(work, work.with_name("kept-" + final.parent.name))
                raise OSError(5, "the end")

        monkeypatch.setattr(tags, "publish", publish)
        assert all("the end" in str(failure) for failure in save_on(folders, tag, tensors, overwrite=overwrite))
        monkeypatch.setattr(tags, "publish", real)
        uuid = manifests.read(folders[1] / tag).uuid
        for folder in (folders[0], folders[2]):
            (folder / ("kept-" + folder.name)).rename(folder / f".{tag}.tmp-{uuid}")
        assert len({manifests.read(folder / "step7").uuid for folder in folders}) == 1 + overwrite
        for opened in load_on(folders, tag):
            check(opened, tensors)
            assert opened.manifest.uuid == uuid
        for folder in folders:
            assert not list(folder.glob(".*"))


@pytest.mark.parametrize("place", ["mkdir", "write", "source", "publish", "latest"])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_failure_on_any_node_is_told_on_all(folders, place, node, monkeypatch):
    save_on(folders, "step7")

    def failing(real, is_it):
        def call(*arguments, **more):
            if is_it(*arguments):
                raise OSError(28, "No space left on device")
            return real(*arguments, **more)

        return call

    own = folders[node]
    where, name, is_it = {
        "mkdir": (work_folder, "_make", lambda request, _: request.folder == own),
        "write": (copies._Target, "write", lambda target, *_: own in target._files.path(0).parents),
        "source": (copies._Source, "read", lambda source, *_: own in source._folder.parents),
        "publish": (tags, "publish", lambda _, final, *__: final.parent == own),
        "latest": (tags, "write_latest", lambda folder, *_: folder == own),
    }[place]
    happens = (place, node == 0) not in {("write", True), ("source", False)}
    monkeypatch.setattr(where, name, failing(getattr(where, name), is_it))
    results = save_on(folders, "step8", SECOND)
    monkeypatch.undo()
    assert not [path for folder in folders for path in folder.glob(".*")]
    if not happens:
        assert [report.tag for report in results] == ["step8"] * 3
        return
    assert len({str(failure) for failure in results}) == 1
    assert all(isinstance(failure, SaveFailed) and "No space left" in str(failure) for failure in results)
    # whatever the nodes have of it, all can go on: with the new one if one of them has it, else with the old one
    opened = load_on(folders)
    assert len({one.manifest.uuid for one in opened}) == 1
    for one in opened:
        check(one, SECOND if one.tag == "step8" else FIRST)
    if place in ("mkdir", "write", "source"):
        assert {one.tag for one in opened} == {"step7"}
    assert [report.tag for report in save_on(folders, "step8", overwrite=True)] == ["step8"] * 3


def test_a_full_disk_at_the_load_is_told_on_all(folders, monkeypatch):
    save_on(folders[:2])
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    results = load_on(folders)
    (text,) = {str(failure) for failure in results}
    assert "1 B free" in text
    assert str(folders[2]) in text


def test_retention_is_that_of_every_node(folders):
    for number in range(4):
        save_on(folders, f"step{number}", keep_last=2)
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step2", "step3"]


def test_an_existing_tag_on_one_node_is_refused_before_anything_is_written(folders):
    save_on(folders[2:])
    for failure in save_on(folders):
        assert isinstance(failure, SaveFailed)
        assert str(folders[2]) in str(failure)
    assert not folders[0].exists() or not list(folders[0].iterdir())


def test_the_folder_of_a_tag_itself(folders):
    save_on(folders)
    for opened in load_on([folder / "step7" for folder in folders]):
        check(opened)
    shutil.rmtree(folders[1] / "step7")
    results = load_on([folder / "step7" for folder in folders])
    assert all(
        isinstance(failure, MpispeedError) and "pass the folder that it is in" in str(failure) for failure in results
    )


def test_ranks_of_the_first_node_share_the_writing(tmp_path, monkeypatch):
    """Nobody else could: the others do not see the folder."""
    seen = []
    real = two_phase.write_through

    def write(comm, folder, tensors, places, streams, writers, size):
        seen.append(tuple(writers))
        return real(comm, folder, tensors, places, streams, writers, size)

    monkeypatch.setattr(two_phase, "write_through", write)
    nodes = [tmp_path / name for name in ("a", "b", "a", "b")]
    whole = {(f"layer{number}", "master"): torch.randn(300, 300) for number in range(6)}
    save_on(nodes, tensors=whole)
    assert set(seen) == {(0, 2)}


def test_an_empty_state(folders):
    empty = {("empty", "master"): torch.zeros(0, 3)}
    assert [report.size_bytes > 0 for report in save_on(folders, tensors=empty)] == [True] * 3
    check(load_on(folders)[2], empty)


def test_one_rank(tmp_path):
    save_on([tmp_path])
    check(load_on([tmp_path])[0])
