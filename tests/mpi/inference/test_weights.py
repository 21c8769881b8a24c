"""Weights of files in sliced models: the values of the whole model, each byte read once per node, one error for all."""

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import save
from mpispeed.inference.weights import load_weights, plan, save_sharded, schedule
from mpispeed.nn.tensor import cuts, inject
from tests.helpers import hub_models

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(comm):
    """One new folder, the same on all ranks."""
    path = Path(comm.share(tempfile.mkdtemp(prefix="mpispeed-weights-") if comm.rank == 0 else None))
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def alone(comm):
    """A group of this rank."""
    made = comm.split(comm.rank, [comm.rank], ("alone",))
    yield made
    made.close()


@pytest.fixture(params=["large pieces", "small pieces"])
def pieces(request, monkeypatch):
    """Pieces of a whole tensor, and so small that rows of a slice are in several."""
    if request.param == "small pieces":
        monkeypatch.setattr(schedule, "PIECE_BYTES", 1 << 10)


def without_values(name):
    """A model of transformers as `set_empty_params` makes it."""
    with torch.device("meta"):
        made = hub_models.builders()[name]()
    made.tie_weights()
    return made


def experts(name):
    """A tiny mixture."""
    import transformers as hub

    size = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    size |= {"vocab_size": hub_models.VOCAB, "intermediate_size": 20}
    torch.manual_seed(5)
    if name == "mixtral":
        return hub.MixtralForCausalLM(hub.MixtralConfig(num_local_experts=3, **size))
    more = {"num_experts": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12}
    return hub.Qwen2MoeForCausalLM(hub.Qwen2MoeConfig(**more, **size))


def write(comm, folder, form, model):
    """The weights of a model in a format of files."""
    if form == "ours":
        params = dict(model.named_parameters())
        tensors = [
            LogicalTensor(name, "master", param.shape, param.dtype, [Piece(0, param.detach().reshape(-1))][comm.rank :])
            for name, param in params.items()
        ]
        save(comm, folder, "t", params=[ParamInfo(n, p.shape) for n, p in params.items()], tensors=tensors)
        return
    if comm.rank == 0 and form == "shards":
        model.save_pretrained(folder, max_shard_size="20KB")
    elif comm.rank == 0:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    comm.barrier()


def expected(comm, model):
    """The model as slicing makes it of values."""
    made = copy.deepcopy(model)
    if comm.size > 1:
        inject(made, comm, vocab=True)
    return made


def assert_same(found, wanted):
    left, right = found.state_dict(), wanted.state_dict()
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(left[name], value), name
    for (name, value), (_, other) in zip(wanted.named_buffers(), found.named_buffers(), strict=True):
        assert torch.equal(value, other), name


CASES = [("shards", "llama"), ("torch", "gpt2"), ("ours", "llama"), ("ours", "gpt2")]


@pytest.mark.parametrize(("form", "name"), CASES)
def test_slices_are_those_of_the_whole_model(comm, folder, pieces, form, name):
    model = hub_models.build(name)
    write(comm, folder, form, model)
    found = hub_models.build(name, seed=6) if form == "torch" else without_values(name)
    if comm.size > 1:
        inject(found, comm, vocab=True, without_values=form != "torch")
        assert cuts(found)
    finished = []
    loaded = load_weights(found, folder, comm, comm, mapped=False, finish=finished.append)
    assert_same(found, expected(comm, model))
    read = sum(comm.gather_objects(loaded.bytes_read))
    if form == "ours":  # where pieces are smaller than blocks, which have a checksum, these are read for each of them
        assert read >= loaded.size_bytes
    else:
        assert read == loaded.size_bytes
    assert sorted(finished) == sorted(path for path, m in found.named_modules() if m._parameters)
    assert len(set(map(tuple, comm.gather_objects(finished)))) == 1


@pytest.mark.parametrize("form", ["shards", "torch", "ours"])
def test_slices_that_a_file_has_as_they_are_are_mapped(comm, folder, monkeypatch, form, alone):
    monkeypatch.setattr(plan, "LEAST_MAPPED_BYTES", 64)
    model = hub_models.build("llama")
    write(comm, folder, form, model)
    found = without_values("llama")
    if comm.size > 1:
        inject(found, comm, vocab=True, without_values=True)
    loaded = load_weights(found, folder, comm, comm)
    assert_same(found, expected(comm, model))
    assert sum(comm.gather_objects(loaded.bytes_read)) < loaded.size_bytes
    with torch.no_grad():
        found.lm_head.weight.zero_()  # a copy of this process
    again = without_values("llama")
    load_weights(again, folder, comm, alone)
    assert_same(again, model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_sharded_copy_is_read_on_any_number_of_ranks(comm, folder, name):
    model = hub_models.build(name)
    cut = expected(comm, model)
    save_sharded(cut, folder, comm)
    found = without_values(name)
    if comm.size > 1:
        inject(found, comm, vocab=True, without_values=True)
    loaded = load_weights(found, folder, comm, comm, mapped=False)
    assert_same(found, cut)
    for size in range(1, comm.size):
        first = comm.rank // size * size
        ranks = range(first, min(first + size, comm.size))
        tensor = comm.split(first, ranks, ("tensor",))
        other = without_values(name)
        node = comm.split(first, ranks, ("node",))
        if tensor.size > 1:
            inject(other, tensor, vocab=True, without_values=True)
        load_weights(other, folder, node, tensor, mapped=comm.size % 2 == 0)
        assert_same(other, expected(tensor, model))
        tensor.close()
        node.close()
    read = comm.gather_objects(loaded.bytes_read)  # of large slices each rank reads its own
    assert sum(read) == loaded.size_bytes
    assert comm.size == 1 or max(read) < loaded.size_bytes


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
@pytest.mark.ranks(1, 2)
def test_experts_are_one_tensor_or_one_for_each(comm, folder, name, alone):
    model = experts(name)
    if comm.rank == 0:
        model.save_pretrained(folder)
        state = {key: value for key, value in model.state_dict().items()}
        torch.save(state, folder / "fused.bin")
    comm.barrier()
    assert any(".experts.0." in key for key in load_file(folder / "model.safetensors"))
    for file in ("model.safetensors", "fused.bin"):
        with torch.device("meta"):
            found = type(model)(model.config)
        load_weights(found, folder / file, comm, alone)
        assert_same(found, model)


@pytest.mark.ranks(4)
def test_two_groups_of_a_node_get_their_slices_at_the_same_time(comm, folder, pieces):
    model = hub_models.build("llama")
    write(comm, folder, "shards", model)
    first = comm.rank // 2 * 2
    tensor = comm.split(first, [first, first + 1], ("tensor",))
    found = without_values("llama")
    inject(found, tensor, vocab=True, without_values=True)
    loaded = load_weights(found, folder, comm, tensor)
    assert_same(found, expected(tensor, model))
    assert sum(comm.gather_objects(loaded.bytes_read)) == loaded.size_bytes
    tensor.close()


def test_values_are_rounded_to_the_dtype_that_is_asked_for(comm, folder, alone):
    model = hub_models.build("llama")
    write(comm, folder, "shards", model)
    found = without_values("llama")
    load_weights(found, folder, comm, alone, dtype=torch.bfloat16)
    for name, param in model.named_parameters():
        assert torch.equal(found.get_parameter(name), param.bfloat16()), name


def break_file(folder, kind):
    """Damage the weights; a part of the message."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    if kind == "missing":
        path.unlink()
        return "which is not in"
    if kind == "cut off":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 8)
        return "damaged"
    with path.open("r+b") as file:
        file.write((2**60).to_bytes(8, "little"))
    return "its header would have"


@pytest.mark.parametrize("kind", ["missing", "cut off", "hostile"])
def test_a_damaged_file_is_one_error_on_all_ranks(comm, folder, kind):
    write(comm, folder, "shards", hub_models.build("llama"))
    text = comm.share(break_file(folder, kind) if comm.rank == 0 else None)
    with pytest.raises(CheckpointError, match=text) as caught:
        load_weights(without_values("llama"), folder, comm, comm)
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


def test_a_damaged_block_is_one_error_on_all_ranks(comm, folder, alone):
    write(comm, folder, "ours", hub_models.build("llama"))
    if comm.rank == 0:
        path = folder / "t" / "model.h5"
        raw = bytearray(path.read_bytes())
        value = hub_models.build("llama").model.norm.weight.detach().numpy().tobytes()
        raw[raw.index(value) + 5] ^= 1
        path.write_bytes(raw)
    comm.barrier()
    found = without_values("llama")
    with pytest.raises(CheckpointError, match=r"norm\.weight/master .*do not match their checksum") as caught:
        load_weights(found, folder, comm, alone)
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


def test_too_little_memory_is_told_before_any_is_taken(comm, folder, alone):
    write(comm, folder, "shards", hub_models.build("llama"))
    found = without_values("llama")
    with pytest.raises(CheckpointError, match="its budget is"):
        load_weights(found, folder, comm, alone, budget=1000)
    assert all(param.is_meta for param in found.parameters())


def test_a_rank_that_cannot_finish_a_module_fails_on_all_ranks(comm, folder, alone):
    model = hub_models.build("llama")
    write(comm, folder, "shards", model)
    found = without_values("llama")
    seen = []

    def finish(path):
        seen.append(path)
        if comm.rank == comm.size - 1 and len(seen) == 1:
            raise OSError(28, "no space for what is made of it")

    with pytest.raises(CheckpointError, match="no space for what is made of it"):
        load_weights(found, folder, comm, alone, finish=finish)
