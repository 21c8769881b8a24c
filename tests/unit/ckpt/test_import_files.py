"""Files of plain weights: safetensors and torch, whole and in shards; pickles that would run code are refused."""

import json
import os
import pickle

import click.testing
import pytest
import torch
from safetensors.torch import save_file

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.faults import RefusedPickle
from mpispeed.ckpt.foreign.found import ReadOptions
from mpispeed.ckpt.format.errors import CorruptCheckpoint, IncompleteCheckpoint
from mpispeed.ckpt.read.reader import open_checkpoint, open_reader
from mpispeed.ckpt.tools.exporting import export
from mpispeed.ckpt.tools.importing import import_checkpoint
from mpispeed.cli.ckpt import ckpt
from tests.zoo import has_same_bits


def weights():
    make = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(13, 7, generator=make),
        "half": torch.randn(5, generator=make).bfloat16(),
        "scalar": torch.randn((), generator=make),
        "none": torch.empty(0, 3),
        "norm.running_var": torch.rand(7, generator=make),
        "count": torch.tensor(12),
    }


def check(folder, tensors, aliases=None):
    with open_checkpoint(folder) as source:
        assert source.names() == ["embed.weight", "half", "none", "scalar"]
        assert source.buffers() == ["count", "norm.running_var"]
        for name, tensor in tensors.items():
            slot = "buffer" if name in source.buffers() else source.slots(name)[0]
            assert has_same_bits(source.read_whole(name, slot), tensor), name
        assert source.slots("half") == ["weight16"]
        assert source.aliases() == (aliases or {})


def test_a_safetensors_file(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors", metadata={"head.weight": "embed.weight", "format": "pt"})
    report = import_checkpoint(tmp_path / "model.safetensors", tmp_path / "to")
    assert (report.form, report.saved.tag) == ("safetensors", "imported")
    check(tmp_path / "to", weights(), {"head.weight": "embed.weight"})


def test_names_lose_the_wrapper_of_layers_that_drop_tokens(tmp_path):
    values = torch.randn(3, 2)
    named = {"layers.1.random_ltd_layer.up.weight": values, "layers.2.up.weight": values + 1}
    named["layers.1.random_ltd_layer.norm.running_var"] = values[0].clone()
    save_file(named, tmp_path / "model.safetensors")
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        assert source.names() == ["layers.1.up.weight", "layers.2.up.weight"]
        assert source.buffers() == ["layers.1.norm.running_var"]
        assert has_same_bits(source.read_whole("layers.1.up.weight", "master"), values)
    save_file(named | {"layers.1.up.weight": values.clone()}, tmp_path / "twice.safetensors")
    with pytest.raises(CheckpointError, match=r"has 'layers.1.up.weight' twice"):
        import_checkpoint(tmp_path / "twice.safetensors", tmp_path / "other")


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_shards_with_an_index(tmp_path, form):
    stem, suffix = ("model", ".safetensors") if form == "safetensors" else ("pytorch_model", ".bin")
    names, places = list(weights()), {}
    for number, own in enumerate((names[:2], names[2:]), 1):
        file = f"{stem}-0000{number}-of-00002{suffix}"
        part = {name: weights()[name] for name in own}
        (save_file if form == "safetensors" else torch.save)(part, tmp_path / file)
        places |= dict.fromkeys(own, file)
    (tmp_path / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert import_checkpoint(tmp_path, tmp_path / "to").form == form
    check(tmp_path / "to", weights())
    (tmp_path / places["count"]).unlink()
    with pytest.raises(IncompleteCheckpoint, match="00002-of"):
        import_checkpoint(tmp_path, tmp_path / "again")


@pytest.mark.parametrize("is_old", [False, True])
def test_a_torch_file_keeps_ties_and_views(tmp_path, is_old):
    state = weights()
    state["head.weight"] = state["embed.weight"]
    state["half"] = torch.stack([state["half"]] * 2, 1)[:, 1]  # not contiguous
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "x.pt", _use_new_zipfile_serialization=not is_old)
    import_checkpoint(tmp_path / "x.pt", tmp_path / "to")
    check(tmp_path / "to", weights(), {"head.weight": "embed.weight"})
    with open_checkpoint(tmp_path / "to") as source:
        assert source.state()["client"] == {"epoch": 3}


def test_a_torch_file_with_its_optimizer(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    import_checkpoint(tmp_path / "x.pt", tmp_path / "to")
    with open_checkpoint(tmp_path / "to") as source:
        for name, param in model.named_parameters():
            assert has_same_bits(source.read_whole(name, "exp_avg"), optimizer.state[param]["exp_avg"])
            assert source.info(name).step == 1


def test_round_trip_through_an_export(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors", metadata={"head.weight": "embed.weight"})
    import_checkpoint(tmp_path / "model.safetensors", tmp_path / "one")
    with open_reader(tmp_path / "one") as reader:
        export(reader, tmp_path / "out", to="safetensors", dtype="keep", shard_bytes=300)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    import_checkpoint(tmp_path / "out", tmp_path / "two")
    check(tmp_path / "two", weights(), {"head.weight": "embed.weight"})


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Stranger:
    """Of a class that no list has."""


@pytest.mark.parametrize("is_old", [False, True])
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(tmp_path, is_old):
    mark = tmp_path / "mark"
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"a": torch.ones(2)}, "x": Command(mark)}, file, _use_new_zipfile_serialization=not is_old)
    for source in (file, tmp_path):
        with pytest.raises(RefusedPickle, match=r"mp_rank_00_model_states.*system"):
            import_checkpoint(source, tmp_path / "to")
    assert not mark.exists()
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("value", "word"), [(Stranger(), "Stranger"), (os.getcwd, "getcwd"), (pickle.loads, "loads"), (eval, "eval")]
)
def test_objects_of_unknown_classes_are_refused_by_name(tmp_path, value, word):
    torch.save({"a": torch.ones(2), "x": value}, tmp_path / "x.pt")
    with pytest.raises(RefusedPickle, match=word):
        torch_files.read(tmp_path / "x.pt")


def test_numpy_values_are_read_without_numpy_s_own_unpickling(tmp_path):
    import numpy as np

    rows = {"number": np.float64(2.5), "array": np.arange(6, dtype=np.int32).reshape(2, 3)}
    torch.save(rows, tmp_path / "x.pt")
    found = torch_files.read(tmp_path / "x.pt")
    assert found["number"] == 2.5
    assert np.array_equal(found["array"], rows["array"])


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_damaged_files_are_told(tmp_path, name):
    if name.endswith("pt"):
        torch.save(weights(), tmp_path / name)
    else:
        save_file(weights(), tmp_path / name)
    data = (tmp_path / name).read_bytes()
    for size in (len(data) - 40, 20, 3, 0):
        (tmp_path / name).write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=name) as caught:
            import_checkpoint(tmp_path / name, tmp_path / "to")
        assert isinstance(caught.value, CorruptCheckpoint)


def test_the_command(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    run = click.testing.CliRunner().invoke
    arguments = ["import", str(tmp_path / "model.safetensors"), str(tmp_path / "to")]
    done = run(ckpt, [*arguments, "--tag", "t", "--prefix-map", "^embed=tokens", "--frozen", "half", "--json"])
    assert done.exit_code == 0, done.output
    row = json.loads(done.output)
    assert (row["tag"], row["form"], row["params"], row["buffers"]) == ("t", "safetensors", 4, 2)
    with open_checkpoint(tmp_path / "to") as source:
        assert "tokens.weight" in source.names()
        assert source.info("half").kind == "frozen"
    assert run(ckpt, [*arguments, "--tag", "t"]).exit_code == 2  # exists
    assert run(ckpt, [*arguments, "--prefix-map", "no pair"]).exit_code == 2
    missing = run(ckpt, ["import", str(tmp_path / "nowhere"), str(tmp_path / "to"), "--json"])
    assert missing.exit_code == 2
    assert "nowhere" in json.loads(missing.output)["error"]


def test_a_wrong_expression_is_told():
    with pytest.raises(CheckpointError, match="regular expression"):
        ReadOptions(frozen="(")
