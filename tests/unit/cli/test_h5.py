"""`mpispeed h5` on every kind of file, made by its own writer; versions, damage, files of others."""

import json
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
from click.testing import CliRunner

from mpispeed.ckpt.tools.exporting import export
from mpispeed.ckpt.tools.show import open_location
from mpispeed.ckpt.write.save import SaveOptions
from mpispeed.cli.h5 import h5
from mpispeed.cli.h5_kinds import KINDS
from mpispeed.generation import results
from mpispeed.generation.finished import scan
from tests.helpers.token_stores import make_store
from tests.unit.ckpt.sample import saved
from tests.unit.generation.work import finish, job
from tests.unit.record.records import put, rows

SINGLE = ("run.h5", "store.h5", "out.h5", "weights.h5")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a file of each kind."""
    where = tmp_path_factory.mktemp("files")
    saved(where / "ckpt", options=SaveOptions(files=2), rng={"cpu": b"12"})
    with open_location(f"{where}/ckpt") as reader:
        export(reader, where / "weights.h5", to="hdf5")
    put(where / "run.h5", rows(range(1, 9)))
    make_store(where / "store.h5", columns={"difficulty": "f4"})
    work = where.with_name("work")
    work.mkdir()
    prompts, batches, identity = job(work, 20)
    finish(work / "work", identity, batches, range(len(batches)))
    found = scan(work / "work", identity, batches)
    paths = {"hdf5_path": where / "out.h5", "json_path": None}
    results.write(prompts, batches, found, identity, **paths)
    return where


def call(*words):
    return CliRunner().invoke(h5, list(map(str, words)))


def altered(source, folder, change):
    path = shutil.copy(source, folder / source.name)
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def test_every_kind_is_listed_shown_and_verified(made):
    done = call("ls", made, "--json")
    assert done.exit_code == 0, done.output
    kinds = {row["file"].removeprefix(f"{made}/"): row["kind"] for row in json.loads(done.stdout)}
    assert kinds == {
        "ckpt/step7/data/d00000.h5": "checkpoint data",
        "ckpt/step7/data/d00001.h5": "checkpoint data",
        "ckpt/step7/model.h5": "checkpoint",
        "ckpt/step7/state.h5": "checkpoint",
        "out.h5": "results of generate",
        "run.h5": "run record",
        "store.h5": "token store",
        "weights.h5": "weights",
    }
    assert set(kinds.values()) == {kind.title for kind in KINDS.values()}
    contents = {row["file"].rpartition("/")[2]: row["contents"] for row in json.loads(done.stdout)}
    assert contents["model.h5"] | {"parameters": 5, "buffers": 2, "step": 7, "tag": "step7"} == contents["model.h5"]
    assert contents["state.h5"]["generators"] == {"cpu": 1} and "client" in contents["state.h5"]["state"]
    assert contents["out.h5"] == {"requests": 20, "answered": 20, "settings": {"temperature": 0.5}}
    assert contents["run.h5"]["steps"] == 8 and len(contents["run.h5"]["series"]) == 3
    assert contents["store.h5"]["documents"] == 50 and contents["store.h5"]["columns"] == {"difficulty": "f4"}
    assert contents["weights.h5"]["tensors"] == 7
    done = call("verify", made, "--json")
    assert done.exit_code == 0, done.output
    assert {row["status"] for row in json.loads(done.stdout)["files"]} == {"ok"}
    done = call("show", made)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    links = [line for line in lines if line.startswith("/params/embed.weight/master  external link -> data/d0000")]
    assert len(links) == 1 and links[0].endswith(".h5:/params/embed.weight/master (not followed)")
    assert 'facts.config    {"train_batch_size": 8, "zero_optimization": {"stage": 2}}' in lines
    assert f"more: mpispeed ckpt show {made}/ckpt/step7" in lines
    assert "/params/embed.weight/momentum16  dataset 300x400 uint16 (bits of bfloat16)" in done.output


@pytest.mark.parametrize("name", [*SINGLE, "ckpt/step7/model.h5", "ckpt/step7/state.h5", "ckpt/step7/data/d00000.h5"])
def test_versions_to_come(made, tmp_path, name):
    """A newer major one is refused by h5 and by the kind's own tools, a newer minor one is a warning."""
    source = made / name
    with h5py.File(source) as file:
        major = int(np.ravel(file.attrs["version"])[0])
    path = altered(source, tmp_path, lambda file: file.attrs.create("version", (major + 1, 0)))
    sentence = f"of version {major + 1}.0; this mpispeed reads version {major}.0; use a newer one for it"
    done = call("show", path)
    assert done.exit_code == 2 and sentence in " ".join(done.output.split())
    assert "/  group" in done.output.splitlines()  # the plain tree
    done = call("verify", path)
    assert done.exit_code == 2 and sentence in done.output
    if name in SINGLE:
        path = altered(source, tmp_path, lambda file: file.attrs.create("version", (major, 9)))
        for command in ("show", "verify"):
            done = call(command, path)
            assert done.exit_code == 0, done.output
            assert f"of version {major}.9, newer than {major}.0: what that added is ignored" in done.output


def spoiled(path, at=-1):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_damage_is_named(made, tmp_path):
    where = tmp_path / "copy"
    shutil.copytree(made, where)
    for name, table in (("run.h5", "rows"), ("store.h5", "tokens")):
        with h5py.File(where / name) as file:
            place = file[table].id.get_offset()
        spoiled(where / name, place)
    spoiled(where / "ckpt/step7/data/d00000.h5")
    with h5py.File(where / "out.h5", "r+") as file:
        file["offsets"][3] = 1000
    with h5py.File(where / "weights.h5", "r+") as file:
        file["scale"].attrs["dtype"] = np.bytes_(b"float128")
    done = call("verify", where, "--json")
    assert done.exit_code == 3
    found = {row["file"].removeprefix(f"{where}/"): row for row in json.loads(done.stdout)["files"]}
    assert {row["status"] for row in found.values()} == {"damaged"}
    said = {name: " ".join(row["problems"]) for name, row in found.items()}
    assert "do not have their checksum" in said["run.h5"]
    assert "tokens" in said["store.h5"]
    assert "d00000.h5: " in said["ckpt/step7/model.h5"]  # the whole tag has one verdict
    assert "/offsets do not grow from 0" in said["out.h5"]
    assert "float128" in said["weights.h5"]
    (where / "ckpt/step7/manifest.json").unlink()
    done = call("verify", where / "ckpt/step7/state.h5")
    assert done.exit_code == 4 and "unfinished" in done.stderr


def test_a_damaged_attribute_hides_nothing_else(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["first"] = [1, 2, 3]
        file["group/inner"] = np.arange(4)
    raw = bytearray((tmp_path / "x.h5").read_bytes())
    raw[raw.index(b"first\0\0\0") + 39] = 0x7F  # a length of its space is more than the greatest it may have
    (tmp_path / "x.h5").write_bytes(raw)
    done = call("show", tmp_path / "x.h5")
    assert done.exit_code == 3
    assert "unreadable: " in done.stdout and "/group/inner  dataset 4 int64" in done.stdout
    assert "dataspace dim 0" in done.stderr
    (tmp_path / "x.h5").write_bytes(raw[:500])
    done = call("show", tmp_path / "x.h5")
    assert done.exit_code == 3 and done.stderr.count("\n") == 1


def test_damage_behind_a_link_is_damage(made, tmp_path):
    (tmp_path / "half.h5").write_bytes((made / "store.h5").read_bytes()[:600])
    (tmp_path / "link.h5").symlink_to("half.h5")
    assert [call("verify", tmp_path / name).exit_code for name in ("half.h5", "link.h5")] == [3, 3]
    (tmp_path / "link.h5").unlink()
    (tmp_path / "link.h5").symlink_to("link.h5")
    assert call("verify", tmp_path / "link.h5").exit_code == 2


@pytest.mark.parametrize("name", SINGLE)
def test_any_byte_may_be_wrong(made, tmp_path, name):
    """Bytes of the first page, where most of HDF5's own data is: a verdict each time, never a traceback."""
    raw, dice = (made / name).read_bytes(), np.random.default_rng(1)
    path, codes = tmp_path / name, set()
    for _ in range(25):
        other = bytearray(raw)
        for place in dice.integers(0, min(len(raw), 4096), 3).tolist():
            other[place] = int(dice.integers(0, 256))
        path.write_bytes(other)
        for command in ("show", "verify"):
            done = call(command, path)
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
            codes.add(done.exit_code)
    assert 3 in codes and codes <= {0, 2, 3, 4}


def test_results_are_compared_table_by_table(made, tmp_path):
    cases = {
        "/finish_reason has the code 99": lambda file: file["finish_reason"].id.write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.full(20, 99, "u1"), mtype=h5py.h5t.NATIVE_UINT8
        ),
        "18 of 20": lambda file: file.attrs.modify("answered", 18),
        "/text: there is no": lambda file: file.__delitem__("text"),
        "/sample: it has 3 elements": lambda file: (
            file.__delitem__("sample"), file.create_dataset("sample", data=np.zeros(3, "i4"))),
        "/prompt: ": lambda file: (
            file.__delitem__("prompt"), file.create_dataset("prompt", data=np.zeros(20, "i8"), chunks=(5,))),
    }  # fmt: skip
    for said, change in cases.items():
        done = call("verify", altered(made / "out.h5", tmp_path, change))
        assert done.exit_code == 3 and said in done.output, (said, done.output)


def test_files_of_others_and_wrong_calls(made, tmp_path):
    path = tmp_path / "other.hdf5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((3, 4), "f4"))
        file["link"] = h5py.ExternalLink("/etc/passwd", "/x")
    done = call("show", path)
    assert done.exit_code == 0
    assert "no file of mpispeed (it does not say what it is); this is its plain tree" in done.output.splitlines()
    assert "/link  external link -> /etc/passwd:/x (not followed)" in done.output.splitlines()
    assert call("ls", path).exit_code == 0
    done = call("verify", path, made / "run.h5")
    assert done.exit_code == 2 and "nothing to compare it with" in done.stderr and "run.h5: ok" in done.stdout
    (tmp_path / "x.h5").write_text("no HDF5")
    assert call("ls", tmp_path).exit_code == 2
    for command in ("ls", "show", "verify"):
        done = call(command, tmp_path / "gone")
        assert done.exit_code == 2 and f"{tmp_path}/gone is not there" in done.stderr
        done = call(command, tmp_path / "x.h5")
        assert done.exit_code == 2 and "it is no HDF5 file" in done.output
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is a folder without files *.h5" in call("ls", empty).stderr


def test_names_in_files_do_not_steer_the_terminal(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_group("\x1b[2J").attrs["\x07"] = np.bytes_(b"\x1b]0;x")
        file.attrs["format"] = np.bytes_(b"\x1b[31m")
    for command in ("ls", "show", "verify"):
        assert not {"\x1b", "\x07"} & set(call(command, path).output)


def test_it_imports_neither_torch_nor_mpi(made):
    program = (
        "import sys\n"
        "from mpispeed.cli.h5 import h5\n"
        "for command in ('ls', 'show', 'verify'):\n"
        "    assert not h5([command, sys.argv[1]], standalone_mode=False), command\n"
        "bad = {'torch', 'mpi4py', 'rich', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(made)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
