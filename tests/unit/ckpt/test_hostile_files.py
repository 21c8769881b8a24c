"""Folders, manifests and `latest` made by others: every one is refused at once, and nothing elsewhere is opened."""

import os
import pickle
import shutil
import socket

import pytest
from click.testing import CliRunner

from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.ckpt.tools.verify import verify
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt import attacks
from tests.unit.ckpt.attacks import read_all, records, refused, sign, sign_files
from tests.unit.ckpt.sample import saved

MODEL, STATE, MANIFEST = schema.MODEL_FILE, schema.STATE_FILE, schema.MANIFEST_FILE
PART = "data/d00001.h5"
GIGABYTE = 1 << 30


@pytest.fixture(scope="module", params=[1, 3], ids=["one file", "three files"])
def any_good(tmp_path_factory, request):
    where = tmp_path_factory.mktemp("good")
    attacks.make(where, request.param)
    return where


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    where = tmp_path_factory.mktemp("good")
    attacks.make(where, 3)
    return where


@pytest.fixture
def folder(good, tmp_path):
    return attacks.copy(good, tmp_path)


def link(path):
    """To the same thing outside."""
    root = next(parent for parent in path.parents if parent.name == "copy")
    path.symlink_to(root.with_name("outside") / path.relative_to(root))


def loop(path):
    path.symlink_to(path.name)


def zero_device(path):
    """Where the system allows one to be made; elsewhere a socket, which is no file either."""
    try:
        os.mknod(path, 0o20600, os.makedev(1, 5))
    except PermissionError:
        listener(path)


def listener(path):
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


def empty(path):
    path.touch()


INSTEAD = [link, loop, os.mkfifo, os.mkdir, zero_device, listener, empty]


def test_the_copy_is_read(any_good, tmp_path):
    folder = attacks.copy(any_good, tmp_path)
    values, params, aliases, state, _ = read_all(folder)
    assert len(values) == len(attacks.TENSORS)
    assert len(params) == 3
    assert aliases == {"tied": "b.weight"}
    assert state["engine"]["global_steps"] == 7
    with attacks.opened_in(tmp_path / "outside") as opened:
        open_checkpoint(tmp_path / "outside").close()
    assert MODEL in opened


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", [MODEL, STATE, MANIFEST, "data", PART])
def test_something_else_in_place_of_a_file(folder, tmp_path, name, instead):
    tag = folder / "step7"
    path = tag / name
    shutil.rmtree(path) if name == "data" else path.unlink()
    instead(path)
    message = refused(folder, tmp_path / "outside")
    if instead is not os.mkdir or name != "data":
        assert str(path) in message


@pytest.mark.parametrize("instead", INSTEAD)
def test_something_else_in_place_of_latest(folder, tmp_path, instead):
    (folder / "latest").unlink()
    instead(folder / "latest")
    assert "Complete tags, newest first: step7" in refused(folder, tmp_path / "outside")


@pytest.mark.parametrize(
    "text",
    [
        "../../etc", "/etc", "..", ".", "../copy/step7", "step7/", "./step7", "step7\0x", "~", "$HOME", "x" * 255,
        "step7\nblake2b:" + "0" * 32, "\x1b[31mstep7", "step7\x00", pickle.dumps("step7").decode("latin-1"),
        "[" * 5000, "\N{BYTE ORDER MARK}step7",
    ],
)  # fmt: skip
def test_latest_names_something_else(folder, tmp_path, text):
    (folder / "latest").write_text(text, encoding="utf-8")
    assert "step7" in refused(folder, tmp_path / "outside")


@pytest.mark.parametrize("name", ["latest", f"step7/{MANIFEST}"])
def test_files_of_a_gigabyte_of_holes_are_not_read(folder, name):
    with (folder / name).open("r+b") as file:
        file.truncate(GIGABYTE)
    assert "bytes" in refused(folder)


def test_a_state_larger_than_memory(folder):
    tag = folder / "step7"
    with (tag / STATE).open("r+b") as file:
        file.truncate(1 << 43)
    found = records(tag)
    found[STATE] |= {"bytes": 1 << 43}
    sign(tag, files=found)
    assert "larger than the memory" in refused(folder)


NAMES = ["../x", "/etc/passwd", "data/../x", "data//d00001.h5", "./model.h5", "data/d1.h5", "data/d00001.h5/", "data/x",
         "x" * 300, "\ud800", "a\nb", "\x1b[2J", "nul\0", "", ".", "..", "data"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_lists_an_odd_name(folder, tmp_path, name):
    tag = folder / "step7"
    sign(tag, files=records(tag) | {name: records(tag)[STATE]})
    assert str(tag) in refused(folder, tmp_path / "outside")


@pytest.mark.parametrize("name", [MODEL, STATE, PART, "data/d00000.h5"])
def test_a_file_is_not_listed(folder, name):
    tag = folder / "step7"
    sign(tag, files={key: value for key, value in records(tag).items() if key != name})
    assert name in refused(folder)


EXTENTS = {
    "beyond": [[0, 10**12]],
    "starts beyond": [[10**12, 1]],
    "overlapping": [[0, 500], [400, 500]],
    "backwards": [[400, 100], [0, 100]],
    "touching": [[0, 100], [100, 100]],
    "empty ones": [[0, 0]] * 10**5,
    "again and again": [[0, 4000]] * 10**5,
    "negative": [[-5, 5]],
    "negative length": [[5, -5]],
    "of three": [[0, 1, 2]],
    "text": "ab",
    "none": None,
    "float": [[0.0, 5.0]],
    "nan": [[float("nan"), 5]],
    "true": [[True, 5]],
    "deep": [[[[[[0]]]]]],
    "sum overflows": [[2**63 - 1, 2**63 - 1]],
}


@pytest.mark.parametrize("what", EXTENTS)
@pytest.mark.parametrize("name", [MODEL, PART])
def test_extents_of_the_index(folder, what, name):
    tag = folder / "step7"
    found = records(tag)
    found[name] |= {"index_extents": EXTENTS[what]}
    sign(tag, files=found)
    assert MANIFEST in refused(folder)


def test_an_index_of_terabytes_of_holes(folder):
    tag = folder / "step7"
    with (tag / PART).open("r+b") as file:
        file.truncate(1 << 43)
    found = records(tag)
    found[PART] |= {"bytes": 1 << 43, "index_extents": [[0, 1 << 43]]}
    sign(tag, files=found)
    assert "index_extents" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e3, True, "1", -1, 2**64, 10**4000, None, [], {}])
@pytest.mark.parametrize("key", ["bytes", "crc32c", "index_crc32c", "version", "major"])
def test_numbers_of_the_manifest(folder, key, value):
    tag = folder / "step7"
    found = records(tag)
    if key == "version":
        sign(tag, version=[1, value])
    elif key == "major":
        sign(tag, version=[value, 0])
    else:
        found[MODEL] |= {key: value}
        sign(tag, files=found)
    assert MANIFEST in refused(folder)


def nested(depth):
    inner = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": nested(60)}, {"layout": nested(300)}, {"layout": [1]}, {"layout": None}, {"tag": "\x1b[2Jx"},
        {"tag": 1}, {"created": "\n"}, {"uuid": "a\0"}, {"global_step": 1.0}, {"global_step": True}, {"files": "abc"},
        {"global_step": 999999}, {"global_step": -5}, {"global_step": 2**80}, {"tag": "step8"},
        {"files": [MODEL]}, {"files": {}}, {"complete": 0}, {"complete": None}, {"format": "other"}, {"version": None},
        {"version": {"1": 0}}, {"version": "10"}, {"version": [1]}, {"version": []},
    ],
)  # fmt: skip
def test_other_parts_of_the_manifest(folder, changes):
    sign(folder / "step7", **changes)
    refused(folder)


@pytest.mark.parametrize("name", [MODEL, STATE])
def test_a_file_of_another_step_that_the_manifest_was_made_to_fit(tmp_path, name):
    """Weights of one step with counters and schedule of another would train on, and nobody would know."""
    steps = [saved(tmp_path, f"s{step}", state={"engine": {"global_steps": step}}) for step in (10, 20)]
    copied = shutil.copytree(steps[1], tmp_path / "copied")
    assert read_all(tmp_path, "copied")[3]["engine"] == {"global_steps": 20}, "a copy under another name is no mixture"
    shutil.copyfile(steps[0] / name, steps[1] / name)
    sign(steps[1], files=records(steps[1]) | {name: records(steps[0])[name]})
    assert f"{name} belongs to another checkpoint: its tag is 's10', the manifest's 's20'" in refused(
        tmp_path, tag="s20"
    )
    assert verify(steps[1], "s20").status == "corrupt"
    assert verify(copied, "copied").status == "ok"


def bomb(marker):
    """A pickle that makes a folder when it is loaded."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    return pickle.dumps(Bomb())


@pytest.mark.parametrize("name", ["latest", MANIFEST, MODEL, STATE, PART, "d00000.h5"])
def test_pickles_are_not_loaded(folder, tmp_path, name):
    tag, marker = folder / "step7", tmp_path / "marker"
    raw = bomb(marker)
    path = folder / name if name == "latest" else tag / ("data/" + name if name.startswith("d0") else name)
    path.write_bytes(raw)
    if name not in ("latest", MANIFEST):
        sign_files(tag)
    refused(folder, tmp_path / "outside")
    assert not marker.exists()
    pickle.loads(raw)
    assert marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", "null", "1", '"x"', "{" * 10**6, "[" * 10**6, '{"a":' * 10**5, "[" + "[]," * 300000 + "[]]",
        "1" * 10**6, "NaN", "\N{BYTE ORDER MARK}{}", "{}\0",
    ],
    ids=range(14),
)  # fmt: skip
def test_other_json_in_place_of_the_manifest(folder, text):
    (folder / "step7" / MANIFEST).write_text(text, encoding="utf-8")
    assert MANIFEST in refused(folder)


def test_a_key_that_comes_twice_in_the_manifest(folder):
    path = folder / "step7" / MANIFEST
    text = path.read_text()
    path.write_text(text.replace(' "tag":', ' "tag": "other",\n "tag":', 1))
    assert "digest" in refused(folder)


def test_a_folder_that_disappears_while_it_is_listed(folder):
    shutil.copytree(folder / "step7", folder / "step8")
    entries = tags.list_tags(folder)
    shutil.rmtree(folder / "step8")
    assert [entry.size_bytes > 0 for entry in entries] == [True, False]


def test_names_of_folders_do_not_steer_a_terminal(folder):
    """In messages of the library, and in those of the command that hold paths as well."""
    odd = "e\x1b[31mvil\nmpispeed: fake"
    shutil.copytree(folder / "step7", folder / odd)
    message = refused(folder, tag="none")
    assert message.isprintable()
    assert "e\\x1b[31mvil\\nmpispeed: fake" in message
    for command, where in (("show", folder / odd / "no"), ("verify", folder / odd / "no"), ("latest", folder / odd)):
        done = CliRunner().invoke(ckpt, [command, str(where)])
        assert done.exit_code
        assert done.output.removesuffix("\n").split("Error: ")[-1].isprintable(), done.output
