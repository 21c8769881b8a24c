"""Files of every release are read by the present code; those of a newer major format are refused with a sentence."""

import json
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from mpispeed.base.errors import CheckpointError
from mpispeed.checkpoints import open_checkpoint
from mpispeed.ckpt.format.index import read_root
from mpispeed.ckpt.format.manifest import read as read_manifest
from mpispeed.ckpt.format.schema import FORMAT
from mpispeed.ckpt.tools.verify import verify
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.record.errors import RecordError
from mpispeed.record.reader import open_record
from mpispeed.token_stores import TokenStoreError, open_store
from tests.helpers.release_files import CHECKPOINTS, EXPECTED, FOLDER, TEXTS

RELEASES = sorted(path for path in FOLDER.iterdir() if path.is_dir())
each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
each_checkpoint = pytest.mark.parametrize("name", CHECKPOINTS)


def expected(release):
    return json.loads((release / EXPECTED).read_text())


def test_releases_are_what_their_folders_say():
    assert "0.1.0" in {path.name for path in RELEASES}
    assert all(expected(path)["release"] == path.name for path in RELEASES)


@each_release
@each_checkpoint
def test_checkpoints(release, name):
    told = expected(release)["checkpoints"][name]
    with open_checkpoint(release / name, "step3") as checkpoint:
        assert checkpoint.global_step == 3
        assert set(checkpoint.names()) == set(told)
        for weight, values in told.items():
            slot = "master" if "master" in checkpoint.slots(weight) else "param"
            assert checkpoint.read_whole(weight, slot).dtype.is_floating_point
            assert checkpoint.read_whole(weight, slot).numel() == len(values)
    report = verify(release / name / "step3", "step3")
    assert not report.problems, report.problems


@each_release
def test_records(release):
    record = open_record(release / "run.h5")
    points = record.points("Train/Samples/train_loss")
    assert points.value.tolist() == expected(release)["losses"]
    assert record.facts["versions"]["mpispeed"] == release.name
    assert record.notes()[0]["kind"] == "save"


@each_release
def test_token_stores(release):
    with open_store(release / "tokens.h5") as store:
        texts = TEXTS
        assert store.document_count == len(texts)
        begins, ends = store.bounds(np.arange(len(texts)))
        for text, first, stop in zip(texts, begins, ends, strict=True):
            assert bytes(store.read(first, stop - first)[: len(text)].tolist()) == text.encode()


@each_release
def test_index_files(release):
    data = MMapIndexedDataset(str(release / "index"))
    assert [row.tolist() for row in data[:]] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def renumber(path, version):
    with h5py.File(path, "r+") as file:
        kind = file.attrs.get_id("version").dtype
        file.attrs["version"] = np.asarray(version, kind)


def with_newer(release, tmp_path, name):
    copy = Path(shutil.copytree(release, tmp_path / "copy"))
    return copy / name


def test_checkpoints_of_a_newer_major_format_are_refused(tmp_path):
    path = with_newer(RELEASES[-1], tmp_path, "adamw-stage-2") / "step3"
    renumber(path / "model.h5", [99, 0])
    newer = r"has checkpoint format 99\.0, this library reads up to \d+\.\d+; install a newer mpispeed"
    with h5py.File(path / "model.h5") as file, pytest.raises(CheckpointError, match=newer):
        read_root(file, FORMAT, path / "model.h5")
    manifest = path / "manifest.json"
    manifest.write_text(re.sub(r'"version": \[\d+', '"version": [99', manifest.read_text()))
    with pytest.raises(CheckpointError, match=newer):
        read_manifest(path)
    with pytest.raises(CheckpointError, match=newer), open_checkpoint(path.parent, "step3"):
        pass


def test_records_and_stores_of_a_newer_format_are_refused(tmp_path):
    record = with_newer(RELEASES[-1], tmp_path, "run.h5")
    renumber(record, 99)
    with pytest.raises(RecordError, match=r"run\.h5 is a run record of version 99\.0; this mpispeed reads"):
        open_record(record)
    store = record.with_name("tokens.h5")
    renumber(store, 99)
    with pytest.raises(TokenStoreError, match=r"tokens\.h5.* version 99\.0; this mpispeed reads"):
        open_store(store)
