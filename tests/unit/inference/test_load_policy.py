"""DeepSpeed's load policies: what they name, what they may not say, and slices of ranks that are put together."""

import json

import pytest
import torch
from torch import nn

from mpispeed.base.errors import CheckpointError
from mpispeed.inference.weights import load_weights
from mpispeed.inference.weights.policy import read_policy
from mpispeed.mesh import sim

WIDTH, HEADS = 12, 2


class Layer(nn.Module):
    """The names of a layer of Megatron."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(10, WIDTH)
        self.attention = nn.ModuleDict(
            {
                "query_key_value": nn.Linear(WIDTH, 3 * WIDTH),
                "dense": nn.Linear(WIDTH, WIDTH),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(WIDTH, 4 * WIDTH),
                "dense_4h_to_h": nn.Linear(4 * WIDTH, WIDTH),
            }
        )
        self.input_layernorm = nn.LayerNorm(WIDTH)


def layer(seed=3):
    torch.manual_seed(seed)
    made = Layer()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_()
    return made


def cut(name, whole, rank, size, version):
    """What Megatron's rank has of a tensor."""
    if name.startswith("attention.query_key_value"):
        if version == 0:
            return torch.cat([part.chunk(size)[rank] for part in whole.chunk(3)])
        return whole.chunk(size)[rank]
    if name in ("attention.dense.weight", "mlp.dense_4h_to_h.weight"):
        return whole.chunk(size, 1)[rank]
    if name.startswith(("mlp.dense_h_to_4h", "word_embeddings")):
        return whole.chunk(size)[rank]
    return whole


def write(folder, model, size, version):
    """Files of `size` ranks."""
    names = []
    for rank in range(size):
        state = {name: cut(name, whole, rank, size, version).clone() for name, whole in model.state_dict().items()}
        names.append(f"mp_rank_{rank:02d}_model_states.pt")
        content = {"module": state, "mp_world_size": size, "checkpoint_version": version}
        torch.save(content, folder / names[-1])
    return names


def load(model, source, **options):
    sim.run(1, lambda world: load_weights(model, source, world.node, world.comm, **options))
    return model


def assert_same(found, expected):
    for (name, value), other in zip(expected.state_dict().items(), found.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
@pytest.mark.parametrize("size", [1, 2])
def test_files_of_megatrons_ranks_are_put_together(tmp_path, version, size):
    model = layer()
    names = write(tmp_path, model, size, version)
    policy = {"type": "Megatron", "checkpoints": names, "base_dir": str(tmp_path)}
    assert_same(load(layer(4), policy), model)
    assert_same(load(layer(4), {**policy, "version": version, "mp_size": size}), model)
    if size > 1:
        wrong = load(layer(4), {**policy, "version": 1.0 if version == 0 else 0})
        name = "attention.query_key_value.weight"
        assert not torch.equal(wrong.get_parameter(name), model.get_parameter(name))


def test_a_policy_in_a_file_names_files_beside_it(tmp_path):
    model = layer()
    state = model.state_dict()
    torch.save({name: state.pop(name) for name in list(state)[:2]}, tmp_path / "non-tp.pt")
    parts = [{n: cut(n, whole, rank, 2, 1.0).clone() for n, whole in state.items()} for rank in range(2)]
    halves = [list(state)[:3], list(state)[3:]]
    names = []
    for number, half in enumerate(halves):
        for rank in range(2):
            names.append(f"tp_{rank:02d}_{number:02d}.pt")
            torch.save({name: parts[rank][name] for name in half}, tmp_path / names[-1])
    content = {"type": "ds_model", "checkpoints": {"non_tp": ["non-tp.pt"], "tp": names}, "tp_size": 2}
    path = tmp_path / "ds_inference_config.json"
    path.write_text(json.dumps({**content, "version": 1.0, "parallelization": "tp", "dtype": "float32"}))
    assert_same(load(layer(4), path), model)


def test_whole_files_are_a_list_or_a_folder(tmp_path):
    model = layer()
    state = model.state_dict()
    torch.save({name: state.pop(name) for name in list(state)[:4]}, tmp_path / "a.bin")
    torch.save(state, tmp_path / "b.bin")
    policy = {"type": "BLOOM", "checkpoints": ["a.bin", "b.bin"], "version": 1.0}
    assert_same(load(layer(4), policy, base_dir=str(tmp_path)), model)
    assert_same(load(layer(4), {"checkpoints": str(tmp_path)}), model)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"type": "gpt"}, "type 'gpt'; it may be"),
        ({"checkpoint": []}, 'Did you mean "checkpoints"'),
        ({"checkpoints": []}, "names no files"),
        ({"checkpoints": [1]}, "they are a list of files"),
        ({"checkpoints": {"pp": []}}, "checkpoints of 'pp'"),
        ({"checkpoints": ["a"], "parallelization": "dp"}, "parallelization 'dp'"),
        ({"checkpoints": ["a"], "tp_size": 0}, "tp_size 0"),
        ({"checkpoints": {"tp": ["a", "b", "c"]}, "tp_size": 2}, "no multiple"),
        ({"checkpoints": ["a"], "dtype": "int8"}, "int8 with scales"),
        ({"type": "Megatron", "checkpoints": ["a"], "version": 3.0}, "version 3.0"),
    ],
)
def test_a_wrong_policy_is_one_sentence(policy, message):
    with pytest.raises(CheckpointError, match=message):
        read_policy(policy)


def test_files_of_another_number_of_ranks_are_refused(tmp_path):
    names = write(tmp_path, layer(), 2, 0)
    policy = {"type": "Megatron", "checkpoints": names[:1], "base_dir": str(tmp_path)}
    with pytest.raises(CheckpointError, match=r"of 2 ranks .*names 1 files"):
        load(layer(), policy)


def test_weights_need_one_place_in_the_file(tmp_path):
    names = write(tmp_path, layer(), 1, 0)
    path = tmp_path / names[0]
    torch.save({**torch.load(path), "model": {}}, path)
    with pytest.raises(CheckpointError, match="either 'module' or 'model'; it has module and model"):
        load(layer(), {"type": "Megatron", "checkpoints": names, "base_dir": str(tmp_path)})


def test_slices_that_make_no_tensor_of_the_model_are_refused(tmp_path):
    model = layer()
    names = write(tmp_path, model, 2, 0)
    state = torch.load(tmp_path / names[1])
    state["module"]["attention.dense.weight"] = torch.zeros(WIDTH, WIDTH // 3)
    torch.save(state, tmp_path / names[1])
    with pytest.raises(
        CheckpointError, match=r"slices of 'attention\.dense\.weight' of the shapes \(12, 6\), \(12, 4\)"
    ):
        load(layer(), {"type": "Megatron", "checkpoints": names, "base_dir": str(tmp_path)})
