"""Altered, cut and missing files are found and named before their bytes are used."""

import contextlib
import json
import shutil

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint
from tests.unit.ckpt.sample import saved, tensors_of


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    where = tmp_path_factory.mktemp("good")
    saved(where)
    return where


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def place_of(folder, name, slot):
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.stored(name, slot).offset


def flip(path, place, mask=0x10):
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ mask]))


def read_all(folder):
    with open_checkpoint(folder) as checkpoint:
        for name, slot in tensors_of():
            checkpoint.read_whole(name, slot)
        checkpoint.state()
        checkpoint.config()
        checkpoint.rng("cpu")


def test_the_untouched_copy_is_read(folder):
    read_all(folder)


def test_a_bit_flipped_in_a_large_tensor_names_file_tensor_and_range(folder):
    model = folder / "step7" / schema.MODEL_FILE
    flip(model, place_of(folder, "embed.weight", "exp_avg") + schema.BLOCK_BYTES + 40)
    block, numel = schema.BLOCK_BYTES // 4, 1_100_000
    with open_checkpoint(folder) as checkpoint:
        checkpoint.read("embed.weight", "exp_avg", 0, torch.empty(block))  # the block before is fine
        with pytest.raises(CorruptCheckpoint, match=rf"model.h5.*embed.weight/exp_avg\[{block}:{numel}\]"):
            checkpoint.read("embed.weight", "exp_avg", block + 100, torch.empty(3))
        out = torch.empty(3)
        checkpoint.read("embed.weight", "exp_avg", block + 9, out, verify=False)
        true = tensors_of()["embed.weight", "exp_avg"].reshape(-1)[block + 9 : block + 12]
        assert not torch.equal(out, true)


@pytest.mark.parametrize(
    ("name", "slot", "numel"), [("layers.0.weight", "master", 2145), ("scale", "master", 1), ("mask", "buffer", 77)]
)
def test_a_bit_flipped_in_a_small_tensor_names_it(folder, name, slot, numel):
    flip(folder / "step7" / schema.MODEL_FILE, place_of(folder, name, slot))
    with open_checkpoint(folder) as checkpoint:
        checkpoint.read_whole("embed.weight", "master")
        with pytest.raises(CorruptCheckpoint, match=rf"model.h5.*{name}/{slot}\[0:{numel}\]"):
            checkpoint.read_whole(name, slot)


def test_no_flipped_bit_of_the_index_goes_unnoticed(folder):
    model = folder / "step7" / schema.MODEL_FILE
    manifest = json.loads((folder / "step7" / schema.MANIFEST_FILE).read_text())
    extents = manifest["files"][schema.MODEL_FILE]["index_extents"]
    places = [start + i for start, length in extents for i in range(length)]
    places = places[:: len(places) // 100]
    for place in places:
        flip(model, place)
        with pytest.raises(CheckpointError, match=r"model\.h5"):
            open_checkpoint(folder)
        flip(model, place)
    read_all(folder)


@pytest.mark.parametrize("name", [schema.MODEL_FILE, schema.STATE_FILE])
def test_truncated_and_missing_files_are_named(folder, name):
    path = folder / "step7" / name
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(CorruptCheckpoint, match=rf"{name} is truncated: {len(raw) - 1} bytes, saved were {len(raw)}"):
        open_checkpoint(folder)
    path.write_bytes(raw + b"x")
    with pytest.raises(CorruptCheckpoint, match=f"{name} is longer"):
        open_checkpoint(folder)
    path.unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{name} is missing"):
        open_checkpoint(folder)


def test_a_file_cut_while_it_is_open_is_noticed(folder):
    model = folder / "step7" / schema.MODEL_FILE
    place = place_of(folder, "embed.weight", "master")
    with open_checkpoint(folder) as checkpoint:
        with model.open("r+b") as file:
            file.truncate(place + 10)
        with pytest.raises(CorruptCheckpoint, match=r"embed.weight/master\[0:1048576\].*is cut off"):
            checkpoint.read_whole("embed.weight", "master")


def test_a_file_of_another_tag_is_refused(folder):
    other = saved(folder, "other", tensors=tensors_of(seed=1), options=None)
    shutil.copy(other / schema.MODEL_FILE, folder / "step7" / schema.MODEL_FILE)
    with pytest.raises(CorruptCheckpoint, match=r"model\.h5 is (damaged|truncated|longer)"):
        open_checkpoint(folder, "step7")


def test_an_altered_state_is_refused_when_it_is_asked_for(folder):
    path = folder / "step7" / schema.STATE_FILE
    flip(path, path.stat().st_size // 2)
    with open_checkpoint(folder) as checkpoint:
        checkpoint.read_whole("scale", "master")
        for ask in (checkpoint.state, checkpoint.config, lambda: checkpoint.rng("cpu")):
            with pytest.raises(CorruptCheckpoint, match=r"state\.h5"):
                ask()


def test_no_flipped_bit_of_the_manifest_goes_unnoticed(folder):
    path = folder / "step7" / schema.MANIFEST_FILE
    raw = path.read_bytes()
    content = json.loads(raw)
    for place in range(0, len(raw) - 1, 7):
        flip(path, place, 0x01)
        changed = None
        with contextlib.suppress(ValueError):
            changed = json.loads(path.read_bytes())
        if changed != content:  # white space may differ without harm
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                open_checkpoint(folder)
        flip(path, place, 0x01)


def rewrite(folder, **changes):
    from mpispeed.ckpt.format import manifest as manifests

    path = folder / "step7" / schema.MANIFEST_FILE
    content = json.loads(path.read_text()) | changes
    path.write_text(manifests.signed(content))


def test_versions_newer_than_this_library(folder, caplog):
    rewrite(folder, version=[2, 9])
    read_all(folder)
    assert "format 2.9, newer than {}.{}".format(*schema.VERSION) in caplog.text
    rewrite(folder, version=[3, 0])
    with pytest.raises(CheckpointError, match=r"format 3\.0.*install a newer"):
        open_checkpoint(folder)


def test_a_manifest_that_lacks_parts_is_refused(folder):
    rewrite(folder, files={})
    with pytest.raises(CorruptCheckpoint, match=r"does not list model\.h5"):
        open_checkpoint(folder)
    rewrite(folder, files={schema.MODEL_FILE: {}})
    with pytest.raises(CheckpointError, match="lacks what format"):
        open_checkpoint(folder)


def test_uncommitted_tags_are_refused(folder):
    rewrite(folder, complete=False)
    with pytest.raises(IncompleteCheckpoint, match="never finished"):
        open_checkpoint(folder)
    (folder / "step7" / schema.MANIFEST_FILE).unlink()
    for where, tag in ((folder, None), (folder, "step7"), (folder / "step7", None)):
        with pytest.raises(IncompleteCheckpoint, match=r"no manifest\.json"):
            open_checkpoint(where, tag)


def test_a_foreign_hdf5_file_is_no_checkpoint(folder):
    import h5py

    from mpispeed.ckpt.format import index

    path = folder / schema.MODEL_FILE
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(CheckpointError, match="no mpispeed-checkpoint"):
        index.read_index(folder)
    path.write_text("no HDF5 at all")
    with pytest.raises(CorruptCheckpoint, match=r"model\.h5"):
        index.read_index(folder)
