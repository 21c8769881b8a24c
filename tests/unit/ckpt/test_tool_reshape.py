"""`ckpt reshape`: the files a save would have written, the same content, nothing half done."""

import hashlib
import json

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import digest
from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint, open_reader
from mpispeed.ckpt.tools import reshape as reshaping
from mpispeed.ckpt.write.save import SaveOptions
from tests.unit.ckpt.memory import watched
from tests.unit.ckpt.sample import STATE, saved, tensors_of

MORE = {
    "aliases": {"head": "embed.weight"},
    "config_json": '{"a": 1}',
    "rng": {"cpu": b"12"},
    "layout": {"axes": {"data": 2}},
}


def contents(path):
    files = [path / schema.MODEL_FILE, *sorted((path / schema.DATA_FOLDER).glob("*"))]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def reshape(source, folder, files, **more):
    with open_reader(source) as reader:
        return reshaping.reshape(reader, folder, files=files, **more)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Number of files -> folder of checkpoints, all of the same state."""
    made = {}
    for files in (1, 3):
        made[files] = tmp_path_factory.mktemp("runs")
        saved(made[files], size=2, options=SaveOptions(files=files), **MORE)
    return made


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 3), (1, 1)])
def test_the_files_are_those_of_a_save(originals, tmp_path, before, after):
    report = reshape(originals[before], tmp_path / "new", after)
    assert (report.tag, report.files, report.path) == ("step7", after, tmp_path / "new" / "step7")
    assert contents(report.path) == contents(originals[after] / "step7")
    assert tags.read_latest(tmp_path / "new") == "step7"
    with open_reader(originals[before]) as old, open_checkpoint(tmp_path / "new") as new:
        assert new.state() == old.state()
        assert new.state()["client"] == STATE["client"]
        assert (new.config(), new.rng("cpu"), new.layout) == ('{"a": 1}', [b"12", b"12"], {"axes": {"data": 2}})
        assert new.manifest.uuid != old.manifest.uuid
        assert new.global_step == 7
        assert report.digest == digest.logical_digest(new) == digest.logical_digest(old)
    assert report.size_bytes == new.manifest.size_bytes


def test_the_digest_is_the_documented_one(originals):
    expected = hashlib.blake2b(digest_size=32)
    with open_reader(originals[3]) as reader:
        for (name, slot), value in sorted(tensors_of().items()):
            dtype = str(value.dtype).removeprefix("torch.")
            expected.update(json.dumps([name, slot, dtype, list(value.shape)]).encode() + b"\n")
            expected.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        assert digest.logical_digest(reader) == f"blake2b:{expected.hexdigest()}"


def test_the_digest_sees_one_bit(tmp_path):
    seen = set()
    for change in (0.0, 1e-7):
        tensors = tensors_of()
        tensors["scale", "master"] = torch.tensor(1.0 + change)
        saved(tmp_path / str(change), tensors=tensors)
        with open_reader(tmp_path / str(change)) as reader:
            seen.add(digest.logical_digest(reader))
    assert len(seen) == 2


def test_a_taken_tag_is_refused_or_replaced(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        reshape(tmp_path, tmp_path, 2)
    reshape(tmp_path, tmp_path, 2, overwrite=True)
    assert len(contents(tmp_path / "step7")) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step7"]
    with pytest.raises(CheckpointError, match="at least 1"):
        reshape(tmp_path, tmp_path / "new", 0)


@pytest.mark.parametrize("where", ["elements", "state"])
def test_damage_is_not_copied(tmp_path, where):
    path = saved(tmp_path)
    with open_reader(tmp_path) as reader:
        place = reader.stored("embed.weight", "exp_avg").offset + 4_300_000
    file = path / (schema.MODEL_FILE if where == "elements" else schema.STATE_FILE)
    raw = bytearray(file.read_bytes())
    raw[place if where == "elements" else len(raw) // 2] ^= 4
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match="embed.weight/exp_avg" if where == "elements" else r"state\.h5"):
        reshape(tmp_path, tmp_path / "new", 2)
    assert list((tmp_path / "new").iterdir()) == []


def test_memory_is_bounded(tmp_path):
    saved(tmp_path, tensors={(name, "master"): torch.randn(6 << 20) for name in "ab"})
    with open_reader(tmp_path) as reader, watched() as grown:
        reshaping.reshape(reader, tmp_path / "new", files=2)
    assert grown[0] < 24 << 20
