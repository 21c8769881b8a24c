"""`ckpt export`, `reshape`, `prune` and `latest` as commands: output, JSON, exit codes."""

import json

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from mpispeed.ckpt.format import schema, tags
from mpispeed.ckpt.tools import exporting
from mpispeed.cli.ckpt import ckpt
from tests.unit.ckpt.sample import saved, tensors_of
from tests.zoo import has_same_bits

SMALL = {("layer.w", "master"): torch.tensor([1.0, 70000.0]), ("layer.b", "master"): torch.ones(3)}


def call(*arguments, code=0):
    result = CliRunner().invoke(ckpt, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def folder(tmp_path):
    saved(tmp_path / "runs", "one", tensors=SMALL, state={"engine": {"global_steps": 1}})
    saved(tmp_path / "runs", "two", tensors=SMALL, state={"engine": {"global_steps": 2}})
    return tmp_path / "runs"


def test_export_guesses_the_format(folder, tmp_path):
    for name in ("w.safetensors", "w.bin", "w.pt", "w.npz", "w.h5"):
        assert str(tmp_path / name) in call("export", folder, tmp_path / name).stdout
    call("export", folder, tmp_path / "out", code=2)
    call("export", folder, tmp_path / "w.npz", "--to", "torch", code=2)
    call("export", folder, tmp_path / "v.npz", "--dtype", "bf16", code=2)
    assert "--force" in call("export", folder, tmp_path / "w.bin", code=2).output
    call("export", folder, tmp_path / "w.bin", "--force")
    call("export", f"{folder}:three", tmp_path / "v.bin", code=2)


def test_export_options(folder, tmp_path):
    done = call("export", f"{folder}:one", tmp_path / "w.safetensors", "--dtype", "fp16", "--prefix-map", "^layer.=")
    assert "layer.w" not in done.stdout
    assert "w: 1 elements are too large for fp16" in done.stderr
    found = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert has_same_bits(found["b"], torch.ones(3).half())
    assert found.keys() == {"w", "b"}
    rows = json.loads(
        call("export", folder, tmp_path / "hf", "--to", "safetensors", "--shard-size", "10", "--json").stdout
    )
    assert [path.rpartition("/")[2] for path in rows["files"]] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip
    assert (rows["tensors"], rows["overflows"]) == (2, {})
    assert rows["bytes"] == sum(path.stat().st_size for path in (tmp_path / "hf").iterdir())
    call("export", folder, tmp_path / "x.npz", "--shard-size", "10", code=2)
    call("export", folder, tmp_path / "x.pt", "--shard-size", "ten", code=2)
    call("export", folder, tmp_path / "x.pt", "--prefix-map", "no equals sign", code=2)
    call("export", folder, tmp_path / "x.pt", "--prefix-map", "nowhere=x", code=2)


def test_export_of_damage_is_told_by_its_code(folder, tmp_path):
    (folder / "one" / schema.MODEL_FILE).write_bytes(b"")
    call("export", f"{folder}:one", tmp_path / "w.bin", code=3)
    (folder / "one" / schema.MANIFEST_FILE).unlink()
    call("export", f"{folder}:one", tmp_path / "w.bin", code=4)
    assert not (tmp_path / "w.bin").exists()


def test_what_export_writes_is_one_file_or_a_folder(tmp_path):
    (tmp_path / "folder.bin").mkdir()
    assert exporting.is_one_file(tmp_path / "w.bin")
    assert not exporting.is_one_file(tmp_path / "folder.bin")
    assert not exporting.is_one_file(tmp_path / "model.v1")


def test_reshape(tmp_path):
    saved(tmp_path / "a", tensors=tensors_of())
    found = json.loads(call("reshape", tmp_path / "a", tmp_path / "b", "--files", "3", "--json").stdout)
    assert (found["tag"], found["files"], found["path"]) == ("step7", 3, str(tmp_path / "b" / "step7"))
    assert found["digest"] in call("verify", tmp_path / "b", "--digest").stdout
    call("diff", tmp_path / "a", tmp_path / "b", "--state")
    call("reshape", tmp_path / "a", tmp_path / "b", "--files", "2", code=2)
    assert "in 2 files" in call("reshape", tmp_path / "a", tmp_path / "b", "--files", "2", "--force").stdout
    assert "in 1 file," in call("reshape", f"{tmp_path / 'b'}:step7", tmp_path / "c", "--files", "1").stdout
    assert (tmp_path / "a/step7/model.h5").read_bytes() == (tmp_path / "c/step7/model.h5").read_bytes()
    call("reshape", tmp_path / "a", tmp_path / "d", "--files", "0", code=2)


def test_prune(folder):
    text = call("prune", folder, "--keep-last", "1", "--dry-run").stdout
    assert "would be freed" in text
    assert [line.split()[:2] for line in text.splitlines()[1:3]] == [["remove", "one"], ["keep", "two"]]
    call("prune", folder, "--keep-every", "2", code=2)
    call("prune", folder, "--keep-last", "0", code=2)
    call("prune", folder / "none", code=2)
    rows = json.loads(call("prune", folder, "--keep-last", "1", "--json").stdout)
    assert [(row["tag"], row["action"]) for row in rows] == [("one", "remove"), ("two", "keep")]
    assert [entry.tag for entry in tags.list_tags(folder)] == ["two"]


def test_latest(folder):
    assert call("latest", folder).stdout == "two\n"
    assert json.loads(call("latest", folder, "--set", "one", "--json").stdout) == {"tag": "one"}
    assert call("latest", folder).stdout == "one\n"
    call("latest", folder, "--set", "three", code=2)
    (folder / "two" / schema.MODEL_FILE).write_bytes(b"")
    call("latest", folder, "--set", "two", code=3)
    (folder / "two" / schema.MANIFEST_FILE).unlink()
    call("latest", folder, "--set", "two", code=4)
    assert tags.read_latest(folder) == "one"
    (folder / schema.LATEST_FILE).unlink()
    call("latest", folder, code=2)
