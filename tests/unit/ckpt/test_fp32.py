"""fp32 state dicts of our checkpoints and of DeepSpeed's, through the functions of DeepSpeed's documentation."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file

import mpispeed
from mpispeed.ckpt.tools.importing import import_checkpoint
from mpispeed.compat import fp32
from tests.unit.ckpt import foreign_folders as folders
from tests.zoo import has_same_bits


@pytest.fixture(params=["grouped", "cut", "ours"])
def root(request, tmp_path):
    """A folder of each kind with the same content."""
    if request.param == "cut":
        folders.write_cut(tmp_path / "from", folders.Known(), 3)
    else:
        folders.write_grouped(tmp_path / "from", folders.Known(), 2)
    if request.param != "ours":
        return tmp_path / "from"
    import_checkpoint(tmp_path / "from", tmp_path / "ours")
    return tmp_path / "ours"


def wanted(known=None):
    known = known or folders.Known()
    state = {name: known.slots[name, "master"] for name in known.names} | known.frozen | known.buffers
    return {name: tensor.float() for name, tensor in state.items()}


def test_a_state_dict_is_whole_fp32_with_ties(root):
    state = mpispeed.get_fp32_state_dict_from_zero_checkpoint(root)
    assert state["head.weight"] is state["embed.weight"]
    assert set(state) == set(wanted()) | {"head.weight"}
    for name, tensor in wanted().items():
        assert has_same_bits(state[name], tensor), name
    assert set(fp32.get_fp32_state_dict_from_zero_checkpoint(str(root), folders.TAG)) == set(state)
    fewer = fp32.get_fp32_state_dict_from_zero_checkpoint(root, exclude_frozen_parameters=True)
    assert set(state) - set(fewer) == {"frozen.weight"}


def test_lazy_objects_read_when_asked(root):
    state = fp32.get_fp32_state_dict_from_zero_checkpoint(root, lazy_mode=True)
    assert state["head.weight"] is state["embed.weight"]
    for name, tensor in wanted().items():
        assert state[name].shape == tensor.shape
        assert has_same_bits(state[name].contiguous(), tensor)


def test_a_model_takes_what_it_has(root):
    layers = {"embed": torch.nn.Embedding(13, 7), "a": torch.nn.Linear(7, 5), "other": torch.nn.Linear(2, 2)}
    model = torch.nn.ModuleDict(layers)
    assert mpispeed.load_state_dict_from_zero_checkpoint(model, root) is model
    assert torch.equal(model["embed"].weight, wanted()["embed.weight"])
    assert torch.equal(model["a"].bias, wanted()["a.bias"])


@pytest.mark.parametrize("output", ["one.bin", "one.safetensors", "torch", "safe"])
def test_conversion_writes_files(root, tmp_path, output):
    path, is_safe = tmp_path / "out" / output, output == "safe"
    for _ in range(2):  # a second call replaces the files
        mpispeed.convert_zero_checkpoint_to_fp32_state_dict(
            root, path, max_shard_size="500B", safe_serialization=is_safe
        )
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.suffix != ".json")
    assert len(files) == 1 if path.is_file() else len(files) > 1
    state = {}
    for file in files:
        state |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    for name, tensor in wanted().items():
        assert has_same_bits(state[name], tensor), name
    if files[0].suffix == ".bin":
        assert torch.equal(state["head.weight"], state["embed.weight"])


def test_errors_are_those_that_scripts_catch(tmp_path):
    function = fp32.get_fp32_state_dict_from_zero_checkpoint
    with pytest.raises(FileNotFoundError, match="nowhere"):
        function(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="latest"):
        function(tmp_path)
    with pytest.raises(FileNotFoundError, match="step9"):
        function(tmp_path, "step9")
    (tmp_path / "step9").mkdir()
    with pytest.raises(FileNotFoundError, match="model_states"):
        function(tmp_path, "step9")
    folders.write_grouped(tmp_path, folders.Known(), 2)
    (tmp_path / folders.TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(ValueError, match="one of 2"):
        function(tmp_path)
    (tmp_path / folders.TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="optimizer state"):
        function(tmp_path)
    with pytest.raises(ValueError, match="max_shard_size"):
        fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", max_shard_size="much")


def test_twelve_and_more_ranks_are_sorted_as_numbers(tmp_path):
    folders.write_grouped(tmp_path, folders.Known(), 12)
    state = fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert all(has_same_bits(state[name], tensor) for name, tensor in wanted().items())


def test_clones_do_not_drag_what_they_were_cut_from(tmp_path):
    flat = torch.arange(100_000.0)
    item = OrderedDict(a=[flat[:3], {"b": (flat[3:5], "text")}], n=4)
    item["again"] = item["a"][0]
    clone = mpispeed.clone_tensors_for_torch_save(item)
    assert type(clone) is OrderedDict
    assert torch.equal(clone["a"][1]["b"][0], flat[3:5])
    assert clone["a"][1]["b"][1] == "text"
    assert clone["again"] is clone["a"][0]
    torch.save(clone, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    flat.zero_()
    assert clone["a"][0].tolist() == [0.0, 1.0, 2.0]
