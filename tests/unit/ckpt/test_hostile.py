"""Checkpoints made by others: loading reads no file but theirs, takes no more memory than they are large."""

import io
import json
import shutil

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.ckpt.format import index, schema, tag_files
from mpispeed.ckpt.format import manifest as manifests
from mpispeed.ckpt.format.errors import CorruptCheckpoint, TagNotFound
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools import ls as listing
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.attacks import make_dict
from tests.unit.ckpt.sample import saved

SECRET = b"what nobody else may read"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    where = tmp_path_factory.mktemp("good")
    saved(where, rng={"cpu": b"12"})
    return where


@pytest.fixture
def folder(good, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["data"] = np.frombuffer(SECRET, np.uint8)
        file["data"].attrs["%kind"] = np.bytes_("bytes")
    return shutil.copytree(good, tmp_path / "copy")


def sign(tag, **changes):
    path = tag / schema.MANIFEST_FILE
    content = json.loads(path.read_text()) | changes
    path.write_text(manifests.signed(content))


def sign_files(tag):
    """Make the manifest fit altered files, as whoever alters a checkpoint on purpose does."""
    content = json.loads((tag / schema.MANIFEST_FILE).read_text())
    for name in (schema.MODEL_FILE, schema.STATE_FILE):
        record = index.plain_record(tag / name)
        content["files"][name] |= {"bytes": record.bytes, "crc32c": record.crc32c}
    content["files"][schema.MODEL_FILE] |= {"index_extents": [], "index_crc32c": 0}
    sign(tag, files=content["files"])


def external_storage(group, name, where):
    group.create_dataset(name, (len(SECRET),), np.uint8, external=[(str(where / "secret"), 0, len(SECRET))])


def external_link(group, name, where):
    group[name] = h5py.ExternalLink(str(where / "secret.h5"), "/data")


def soft_link(group, name, where):
    group[name] = h5py.SoftLink("/" + schema.CONFIG)


def huge_chunked(group, name, where):
    group.create_dataset(name, (1 << 40,), np.uint8, chunks=(1 << 20,))


def huge_contiguous(group, name, where):
    group.create_dataset(name, (1 << 40,), np.uint8)  # space is taken when elements are written, so never


def virtual(group, name, where):
    layout = h5py.VirtualLayout((len(SECRET),), np.uint8)
    layout[:] = h5py.VirtualSource(str(where / "secret.h5"), "data", (len(SECRET),))
    group.create_virtual_dataset(name, layout)


TRICKS = [external_storage, external_link, soft_link, huge_chunked, huge_contiguous, virtual]


def plant(group, name, trick, where):
    trick(group, name, where)
    if isinstance(group.get(name, getlink=True), h5py.HardLink):
        group[name].attrs["%kind"] = np.bytes_("bytes")


@pytest.mark.parametrize("trick", TRICKS)
def test_a_state_that_points_elsewhere_or_is_huge_is_refused(folder, trick):
    path = folder / "step7" / schema.STATE_FILE
    with h5py.File(path, "r+") as file:
        client = file["state/client"]
        make_dict(client, ["leak"])
        plant(client, "leak", trick, folder.parent)
    sign_files(folder / "step7")
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CorruptCheckpoint, match=r"state\.h5.*/state/client/leak"),
    ):
        checkpoint.state()


@pytest.mark.parametrize("trick", TRICKS)
def test_generators_that_point_elsewhere_are_refused(folder, trick):
    path = folder / "step7" / schema.STATE_FILE
    with h5py.File(path, "r+") as file:
        plant(file["state/rng"], "leak", trick, folder.parent)
    with pytest.raises(CorruptCheckpoint, match=r"state\.h5.*/state/rng/leak"):
        tag_files.decode_content(path, path.read_bytes())


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("home", ["params/scale", "buffers", "integrity/scale"])
def test_a_model_that_points_elsewhere_or_is_huge_is_refused(folder, trick, home):
    path = folder / "step7" / schema.MODEL_FILE
    name = "master" if home.startswith("integrity") else "leak"
    with h5py.File(path, "r+") as file:
        if name in file[home]:
            del file[home][name]
        plant(file[home], name, trick, folder.parent)
    sign_files(folder / "step7")
    with pytest.raises(CorruptCheckpoint, match=rf"model\.h5.*/{home}/{name}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["params", "buffers", "aliases", "integrity"])
def test_a_whole_group_in_another_file_is_refused(folder, name):
    path = folder / "step7" / schema.MODEL_FILE
    with h5py.File(path, "r+") as file:
        del file[name]
        file[name] = h5py.ExternalLink(str(folder.parent / "secret.h5"), "/")
    with pytest.raises(CorruptCheckpoint, match=rf"model\.h5.*/{name} is a soft or external link"):
        index.read_index(path.parent)


@pytest.mark.parametrize("key", ["way/data", "/config", ".", "again"])
def test_keys_cannot_walk_through_links_or_back(folder, key):
    path = folder / "step7" / schema.STATE_FILE
    with h5py.File(path, "r+") as file:
        client = file["state/client"]
        client["way"] = h5py.ExternalLink(str(folder.parent / "secret.h5"), "/")
        client["again"] = client
        make_dict(client, [key])
    with pytest.raises(CorruptCheckpoint, match=r"state\.h5"):
        tag_files.decode_state(path, path.read_bytes())


def test_a_small_file_in_memory_is_large_enough_for_its_own_datasets():
    from mpispeed.ckpt.format import hdf5

    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        file["x"] = np.arange(5, dtype=np.int64)
    with hdf5.open_reading(image) as file:
        assert h5py.Dataset(hdf5.child_dataset(file.id, "x"))[()].tolist() == [0, 1, 2, 3, 4]


def record_of(tag, **changes):
    files = json.loads((tag / schema.MANIFEST_FILE).read_text())["files"]
    return files | {schema.MODEL_FILE: files[schema.MODEL_FILE] | changes}


def without_version(tag):
    path = tag / schema.MANIFEST_FILE
    content = json.loads(path.read_text())
    del content["version"]
    path.write_text(json.dumps(content))
    sign(tag)


def directory_as(name):
    def change(tag):
        (tag / name).unlink()
        (tag / name).mkdir()

    return change


BROKEN_TAGS = {
    "no version": without_version,
    "version text": lambda tag: sign(tag, version="abc"),
    "version of texts": lambda tag: sign(tag, version=["1", "0"]),
    "version of three": lambda tag: sign(tag, version=[1, 0, 0]),
    "bytes text": lambda tag: sign(tag, files=record_of(tag, bytes="1")),
    "bytes missing": lambda tag: sign(tag, files={schema.MODEL_FILE: {}}),
    "negative extent": lambda tag: sign(tag, files=record_of(tag, index_extents=[[0, -5]])),
    "extent past the end": lambda tag: sign(tag, files=record_of(tag, index_extents=[[10**9, 50]])),
    "extents again and again": lambda tag: sign(tag, files=record_of(tag, index_extents=[[0, 10**4]] * 10**4)),
    "no files": lambda tag: sign(tag, files=None),
    "files in a list": lambda tag: sign(tag, files=[]),
    "record is a number": lambda tag: sign(tag, files={schema.MODEL_FILE: 1}),
    "file elsewhere": lambda tag: sign(tag, files=record_of(tag) | {"../x": record_of(tag)[schema.STATE_FILE]}),
    "step text": lambda tag: sign(tag, global_step="9"),
    "layout a list": lambda tag: sign(tag, layout=[1]),
    "date a number": lambda tag: sign(tag, created=1),
    "deep": lambda tag: (tag / schema.MANIFEST_FILE).write_text("[" * 100_000),
    "manifest is a folder": directory_as(schema.MANIFEST_FILE),
    "model is a folder": directory_as(schema.MODEL_FILE),
}


@pytest.mark.parametrize("what", BROKEN_TAGS)
def test_a_broken_tag_is_corrupt_and_hides_no_other(folder, what):
    shutil.copytree(folder / "step7", folder / "fine")
    BROKEN_TAGS[what](folder / "step7")
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json|model\.h5"):
        open_checkpoint(folder, "step7")
    rows = {row["tag"]: row["status"] for row in listing.rows(folder)}
    assert rows == {"fine": "ok", "step7": "corrupt"}
    table = CliRunner().invoke(ckpt, ["ls", str(folder)])
    assert table.exit_code == 0
    assert table.stdout.count("corrupt") == 1


def test_a_manifest_nested_almost_too_deep(folder):
    path = folder / "step7" / schema.MANIFEST_FILE
    for depth in (400, 800, 990, 3000):
        path.write_text('{"format": "mpispeed-checkpoint", "x": ' + "[" * depth + "]" * depth + "}")
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is damaged"):
            open_checkpoint(folder)


@pytest.mark.parametrize("content", [None, "x" * 300, "ö" * 200, ""])
def test_a_latest_that_names_nothing_possible_is_corrupt(folder, content):
    (folder / "latest").unlink()
    if content is None:
        (folder / "latest").mkdir()
    else:
        (folder / "latest").write_text(content, encoding="utf-8")
    with pytest.raises(CorruptCheckpoint, match=r"latest is damaged.*step7"):
        open_checkpoint(folder)
    assert [row["status"] for row in listing.rows(folder)] == ["ok"]


@pytest.mark.parametrize("tag", ["x" * 300, "a\0b", "../copy/step7", ""])
def test_impossible_tags_are_not_found(folder, tag):
    with pytest.raises(TagNotFound, match="step7"):
        open_checkpoint(folder, tag)
