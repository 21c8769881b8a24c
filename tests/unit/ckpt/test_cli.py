"""`mpispeed ckpt`: what it prints, its exit codes, and what it does not import."""

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import save
from mpispeed.cli.ckpt import ckpt
from mpispeed.mesh.backends.solo import solo_comm
from tests.unit.ckpt.sample import saved


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("runs")
    saved(where, "early", state={"engine": {"global_steps": 3}})
    saved(
        where,
        "late",
        size=2,
        state={"engine": {"global_steps": 9}, "client": {"lr": float("nan"), 3: torch.ones(2).bfloat16()}},
        aliases={"head": "embed.weight"},
        config_json='{"a": 1}',
        layout={"axes": {"data": 2}},
        rng={"cpu": b"12"},
    )
    (where / (".late.tmp-" + "0" * 32)).mkdir()
    return where


def test_ls(folder):
    lines = call("ls", folder).stdout.splitlines()
    assert lines[0].split() == ["tag", "step", "size", "date", "layout", "status"]
    assert lines[1].split()[:3] == ["early", "3", lines[1].split()[2]]
    assert lines[1].endswith("ok")
    assert lines[2].split()[:3] == ["*", "late", "9"]
    assert "data=2" in lines[2]
    assert lines[3].split()[0] == "late"
    assert lines[3].endswith("partial")
    assert len(lines) == 4


def test_ls_json(folder):
    rows = json.loads(call("ls", folder, "--json").stdout)
    assert [(row["tag"], row["step"], row["status"], row["is_latest"]) for row in rows] == [
        ("early", 3, "ok", False),
        ("late", 9, "ok", True),
        ("late", None, "partial", False),
    ]
    assert rows[1]["bytes"] == sum(file.stat().st_size for file in (folder / "late").iterdir())
    assert rows[1]["layout"] == {"axes": {"data": 2}}


def test_ls_of_nothing_is_one_line(tmp_path):
    result = call("ls", tmp_path / "missing", code=2)
    assert len(result.output.splitlines()) == 1
    assert "missing" in result.output
    assert call("ls", tmp_path).stdout == f"no tags in {tmp_path}\n"


def test_show_takes_the_latest_or_a_tag(folder):
    assert json.loads(call("show", folder, "--json").stdout)["tag"] == "late"
    assert json.loads(call("show", f"{folder}:early", "--json").stdout)["step"] == 3
    assert json.loads(call("show", folder / "early", "--json").stdout)["tag"] == "early"


def test_show_table(folder):
    rows = {line.split()[0]: line.split() for line in call("show", folder).stdout.splitlines()}
    assert rows["embed.weight"][1:7] == [
        "1100x1000",
        "bfloat16",
        "trainable",
        "none",
        "0",
        "master,exp_avg,momentum16",
    ]
    assert rows["scale"][1] == "scalar"
    assert rows["mask"][1:4] == ["7x11", "bool", "buffer"]
    assert rows["head"][3:6] == ["alias", "of", "embed.weight"]
    assert rows["frozen/odd%name"][6] == "weight16"


def test_show_numbers_of_experts(tmp_path):
    names = {"experts.2.up": (2, 4), "gate": None}
    values = torch.arange(6.0)
    params = [ParamInfo(name, (6,), expert=expert) for name, expert in names.items()]
    tensors = [LogicalTensor(name, "master", (6,), values.dtype, [Piece(0, values)]) for name in names]
    save(solo_comm(), tmp_path, "tag", params=params, tensors=tensors)
    rows = {line.split()[0]: line.split() for line in call("show", tmp_path).stdout.splitlines()}
    assert rows["name"][:3] == ["name", "expert", "shape"]
    assert rows["experts.2.up"][1:5] == ["2", "of", "4", "6"]
    assert rows["gate"][1:3] == ["-", "6"]
    found = json.loads(call("show", tmp_path, "--json").stdout)["tensors"]
    assert {row["name"]: row["expert"] for row in found} == {"experts.2.up": [2, 4], "gate": None}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("embed", ["embed.weight"]),
        ("layers.*", ["layers.0.weight"]),
        ("*.weight", ["embed.weight", "layers.0.weight"]),
        ("nothing", []),
    ],
)
def test_show_pattern(folder, pattern, names):
    found = json.loads(call("show", folder, pattern, "--json").stdout)["tensors"]
    assert [row["name"] for row in found] == names


def test_show_json_of_a_tensor(folder):
    (row,) = json.loads(call("show", folder, "embed", "--json").stdout)["tensors"]
    assert row["shape"] == [1100, 1000]
    assert row["slots"] == {"master": "float32", "exp_avg": "float32", "momentum16": "bfloat16"}
    assert row["bytes"] == 2 * 1_100_000 * 4 + 300 * 400 * 2


def test_show_state_config_and_layout(folder):
    text = call("show", folder, "--state", "--config", "--layout").stdout
    for line in ("state.engine.global_steps = 9", 'state.client.lr = "nan"', "layout.axes.data = 2", '  "a": 1'):
        assert line in text.splitlines()
    content = json.loads(call("show", folder, "--state", "--config", "--layout", "--json").stdout)
    assert content["config"] == {"a": 1}
    assert content["state"]["client"]["3"] == "tensor bfloat16 [2]"
    assert content["state"]["rng"] == {"cpu": "2 ranks, 2 bytes each"}
    assert "tensors" not in content


def test_exit_codes(tmp_path):
    call("show", tmp_path / "missing", code=2)
    call("show", tmp_path, code=2)
    call("ls", code=2)
    saved(tmp_path, "t")
    result = call("show", f"{tmp_path}:u", code=2)
    assert "newest first: t" in result.output
    model = tmp_path / "t" / schema.MODEL_FILE
    raw = model.read_bytes()
    model.write_bytes(raw[:-5])
    result = call("show", tmp_path, code=3)
    assert "model.h5 is truncated" in result.output
    listed = call("ls", tmp_path)
    assert listed.stdout.splitlines()[1].endswith("corrupt")
    assert "model.h5 is truncated" in listed.stderr
    (tmp_path / "t" / schema.MANIFEST_FILE).unlink()
    call("show", tmp_path, code=4)


def test_neither_torch_nor_mpi_is_imported(folder):
    program = (
        "import sys\n"
        "from mpispeed.cli.ckpt import ckpt\n"
        "for arguments in (['ls'], ['show'], ['show', '--state', '--config', '--layout']):\n"
        "    ckpt([*arguments, sys.argv[1]], standalone_mode=False)\n"
        "bad = {'torch', 'mpi4py', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tensor bfloat16 [2]" in done.stdout


def test_failures_are_json_too(tmp_path):
    def error(*arguments, code):
        found = json.loads(call(*arguments, "--json", code=code).stdout)
        assert found.keys() == {"ok", "error"}
        assert found["ok"] is False
        return found["error"]

    assert "missing" in error("ls", tmp_path / "missing", code=2)
    saved(tmp_path, "t")
    assert "newest first: t" in error("show", f"{tmp_path}:u", code=2)
    (tmp_path / "t" / schema.MODEL_FILE).write_bytes(b"")
    assert "model.h5 is truncated" in error("show", tmp_path, code=3)
    (tmp_path / "t" / schema.MANIFEST_FILE).unlink()
    assert "never finished" in error("show", tmp_path, code=4)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path):
    saved(tmp_path, tensors={("odd\x1b[31m", "master"): torch.ones(2)})
    shown = call("show", tmp_path).output
    assert "\x1b" not in shown
    assert "odd\\x1b[31m" in shown
