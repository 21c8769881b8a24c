"""`ckpt tree`: every object once, links as links."""

import json
import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.errors import CorruptCheckpoint
from mpispeed.ckpt.tools import tree
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.attacks import limited
from tests.unit.ckpt.sample import saved


def by_path(rows, file=schema.MODEL_FILE):
    return {row["path"]: row for row in rows if row["file"] == file}


def visited(path):
    """Paths of groups and datasets as h5py sees them."""
    found = {"/"}
    with h5py.File(path) as file:
        file.visit(lambda name: found.add(f"/{name}"))
    return found


def test_one_file(tmp_path):
    path = saved(tmp_path, aliases={"head": "embed.weight"})
    rows = tree.rows(str(tmp_path))
    for file in (schema.MODEL_FILE, schema.STATE_FILE):
        assert by_path(rows, file).keys() == visited(path / file)
    found = by_path(rows)
    weight = found["/params/layers.0.weight/master"]
    assert (weight["kind"], weight["shape"], weight["type"], weight["bytes"]) == ("dataset", [33, 65], "float32", 8580)
    assert weight["offset"] > 0
    assert found["/params/frozen%2Fodd%25name"]["attributes"]["shape"] == [129]
    assert found["/params/embed.weight/momentum16"]["attributes"] == {"dtype": "bfloat16"}
    assert found["/aliases"]["type"] == "text[24]"
    assert found["/"]["attributes"]["tag"] == "step7"
    state = by_path(rows, schema.STATE_FILE)
    assert state["/state/client"]["attributes"]["note"] == "läuft"
    assert state["/state/client"]["attributes"]["best"] is None


def test_links_are_shown_and_not_followed(tmp_path):
    saved(tmp_path, options=SaveOptions(files=3))
    rows = tree.rows(f"{tmp_path}:step7")
    assert list(dict.fromkeys(row["file"] for row in rows)) == [
        "model.h5", "data/d00000.h5", "data/d00001.h5", "data/d00002.h5", "state.h5"]  # fmt: skip
    link = by_path(rows)["/params/scale/master"]
    assert (link["kind"], link["target"]) == ("external link", "data/d00002.h5:/params/scale/master")
    assert by_path(rows, "data/d00002.h5")["/params/scale/master"]["kind"] == "dataset"


def test_any_file(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a/b"] = [1, 2]
        file["a/c"] = file["a/b"]
        file["a/up"] = file["/"]
        file["soft"] = h5py.SoftLink("/nowhere")
        file["out"] = h5py.ExternalLink("/etc/passwd", "/x")
        file["text"] = "abc"
        file["type"] = h5py.h5t.NATIVE_INT16.dtype
        file["a"].attrs["long"] = np.bytes_("x" * 60_000)
        file["a"].attrs["elsewhere"] = "of variable length"
        many = file.create_group("many", track_order=True)
        for number in range(300):
            many.attrs[f"a{number}"] = number
        file["a"].attrs["odd"] = [float("inf"), 1.0]
    found = by_path(tree.rows(str(path)), "x.h5")
    kinds = {where: (row["kind"], row["target"]) for where, row in found.items()}
    assert kinds == {
        "/": ("group", None),
        "/a": ("group", None),
        "/a/b": ("dataset", None),
        "/a/c": ("same as", "/a/b"),
        "/a/up": ("same as", "/"),
        "/many": ("group", None),
        "/out": ("external link", "/etc/passwd:/x"),
        "/soft": ("soft link", "/nowhere"),
        "/text": ("dataset", None),
        "/type": ("type", None),
    }
    assert found["/text"]["type"] == "text"
    assert found["/a"]["attributes"]["odd"] == ["inf", 1.0]
    assert len(found["/a"]["attributes"]["long"]) == 60_000
    # not read: HDF5 keeps such text in a heap
    assert found["/a"]["attributes"]["elsewhere"] == "text []"
    assert found["/many"]["attributes"] == {f"a{number}": number for number in range(300)}
    text = CliRunner().invoke(ckpt, ["tree", str(path)]).output
    for line in ("  /a/c  same as /a/b", "  /soft  soft link -> /nowhere (not followed)", '    @odd = ["inf", 1.0]'):
        assert line in text.splitlines()
    assert json.loads(CliRunner().invoke(ckpt, ["tree", str(path), "--json"]).output)[0]["path"] == "/"


def test_damage_and_wrong_calls(tmp_path):
    path = saved(tmp_path)
    (path / schema.STATE_FILE).write_bytes(b"no HDF5")
    with pytest.raises(CorruptCheckpoint, match=r"state\.h5"):
        tree.rows(str(tmp_path))
    assert CliRunner().invoke(ckpt, ["tree", str(tmp_path)]).exit_code == 3
    (path / schema.STATE_FILE).unlink()
    (path / schema.MANIFEST_FILE).unlink()
    assert by_path(tree.rows(str(tmp_path)))["/params"]["kind"] == "group"
    assert CliRunner().invoke(ckpt, ["tree", str(tmp_path / "none")]).exit_code == 2


@pytest.mark.parametrize("name", [schema.MODEL_FILE, schema.STATE_FILE])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    path = saved(tmp_path) / name
    path.unlink()
    os.mkfifo(path)
    with limited(20), pytest.raises(CorruptCheckpoint, match=rf"{name} .*it is no ordinary file"):
        tree.rows(str(tmp_path))


def test_tools_that_look_import_neither_torch_nor_mpi(tmp_path):
    saved(tmp_path, options=SaveOptions(files=3), aliases={"x": "embed.weight"})
    program = (
        "import sys\n"
        "from mpispeed.cli.ckpt import ckpt\n"
        "here = sys.argv[1]\n"
        "calls = [['verify', here, '--digest'], ['verify', here, '--all', '--quick'],\n"
        "         ['diff', here, here, '--state'],\n"
        "         ['tree', here], ['prune', here, '--keep-last', '1'], ['latest', here],\n"
        "         ['latest', here, '--set', 'step7'],\n"
        "         ['export', here, here + '/w.safetensors', '--dtype', 'bf16'], ['export', here, here + '/w.h5']]\n"
        "for arguments in calls:\n"
        "    assert not ckpt(arguments, standalone_mode=False), arguments\n"
        "bad = {'torch', 'mpi4py', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
