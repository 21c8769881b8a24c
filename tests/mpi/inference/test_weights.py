"""Weights of files in sliced models: the values of the whole model, each byte read once per node, one error for all."""

import copy
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import save
from mpispeed.inference.weights import load_weights, schedule
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


@pytest.mark.parametrize("form", ["shards", "torch", "ours"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_slices_are_those_of_the_whole_model(comm, folder, pieces, form, name):
    model = hub_models.build(name)
    write(comm, folder, form, model)
    for empty in (True, False):
        found = without_values(name) if empty else hub_models.build(name, seed=6)
        if comm.size > 1:
            inject(found, comm, vocab=True, without_values=empty)
            assert cuts(found)
        finished = []
        loaded = load_weights(found, folder, comm, comm, finish=finished.append)
        assert_same(found, expected(comm, model))
        assert sum(comm.gather_objects(loaded.bytes_read)) >= loaded.size_bytes
        if form != "ours":  # of those, blocks are read that have a checksum
            assert sum(comm.gather_objects(loaded.bytes_read)) == loaded.size_bytes
        assert finished[-1] in dict(found.named_modules())
        assert sorted(set(finished)) == sorted(path for path, m in found.named_modules() if m._parameters)
        assert len(set(map(tuple, comm.gather_objects(finished)))) == 1


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


def test_values_are_rounded_to_the_dtype_that_is_asked_for(comm, folder):
    model = hub_models.build("llama")
    write(comm, folder, "shards", model)
    found = without_values("llama")
    load_weights(found, folder, comm, comm.split(comm.rank, [comm.rank], ("alone",)), dtype=torch.bfloat16)
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


def test_a_damaged_block_is_one_error_on_all_ranks(comm, folder):
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
        load_weights(found, folder, comm, comm.split(comm.rank, [comm.rank], ("alone",)))
    assert len(set(comm.gather_objects(str(caught.value)))) == 1


def test_too_little_memory_is_told_before_any_is_taken(comm, folder):
    write(comm, folder, "shards", hub_models.build("llama"))
    found = without_values("llama")
    with pytest.raises(CheckpointError, match="its budget is"):
        load_weights(found, folder, comm, comm.split(comm.rank, [comm.rank], ("alone",)), budget=1000)
    assert all(param.is_meta for param in found.parameters())


def test_a_file_that_shrinks_meanwhile_fails_on_all_ranks(comm, folder):
    model = hub_models.build("llama")
    write(comm, folder, "shards", model)
    found = without_values("llama")
    seen = []

    def shrink(path):
        seen.append(path)
        if comm.rank == comm.size - 1 and len(seen) == 1:
            raise OSError(28, "no space for what is made of it")

    with pytest.raises(CheckpointError, match="no space for what is made of it"):
        load_weights(found, folder, comm, comm.split(comm.rank, [comm.rank], ("alone",)), finish=shrink)
