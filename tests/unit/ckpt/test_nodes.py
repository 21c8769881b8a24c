"""How ranks on several nodes decide who writes; nodes are ranks with names of their own."""

import threading

import pytest

from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import SaveFailed
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.write import work_folder
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.store.mounts import Mount
from tests.unit.ckpt.sample import save_by, tensors_of
from tests.zoo import has_same_bits


@pytest.fixture
def nodes(monkeypatch):
    """Every thread, which is a rank, is a node of its own."""
    monkeypatch.setattr(tags, "own_node", lambda: (threading.current_thread().name, ""))


def check(folder, tensors):
    with open_checkpoint(folder) as checkpoint:
        assert all(has_same_bits(checkpoint.read_whole(*key), value) for key, value in tensors.items())


def test_where_a_trial_finds_nothing_against_it_all_write(nodes, tmp_path):
    reports = save_by(3, tmp_path)
    assert [(r.is_direct, r.files) for r in reports] == [(True, 1)] * 3
    check(tmp_path, tensors_of())


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "fuse.unheard-of", "virtiofs"])
def test_some_file_systems_are_not_tried(nodes, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "mount_of", lambda _: Mount("/", kind, ""))
    reports = save_by(3, tmp_path)
    assert [(r.is_direct, r.files) for r in reports] == [(False, 3)] * 3
    check(tmp_path, tensors_of())
    reports = save_by(3, tmp_path, "asked", options=SaveOptions(writing="direct"))
    assert reports[0].is_direct


def test_a_trial_that_loses_bytes_is_noticed(nodes, tmp_path, monkeypatch):
    real = work_folder.os.pwrite

    def once(handle, data, offset):
        # what the second node writes into a page that the first one has too
        is_trial = len(data) == work_folder._SHARE_BYTES and offset > 0
        return real(handle, bytes(len(data)) if is_trial else data, offset)

    monkeypatch.setattr(work_folder.os, "pwrite", once)
    reports = save_by(2, tmp_path)
    assert [(r.is_direct, r.files) for r in reports] == [(False, 2)] * 2
    check(tmp_path, tensors_of())


def test_one_node_needs_no_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "_try", lambda *_: pytest.fail("tried"))
    assert save_by(3, tmp_path)[0].is_direct


def test_what_is_no_checkpoint_is_never_replaced(tmp_path):
    options = SaveOptions(overwrite=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for tag in ("data", "file", "link"):
        results = save_by(2, tmp_path, tag, options=options)
        assert all(isinstance(result, SaveFailed) and "is no checkpoint" in str(result) for result in results)
    assert (tmp_path / "data" / "mine").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert not isinstance(save_by(2, tmp_path, "empty", options=options)[0], Exception)
