"""Files that cannot be trusted, and names that differ between files and models."""

import zipfile

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import ReadOptions
from mpispeed.inference.weights import budget, load_weights, save_sharded
from mpispeed.mesh import sim
from tests.unit.ckpt import foreign_folders as folders


class Inner(nn.Module):
    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.second.register_buffer("steps", torch.zeros(3, dtype=torch.bool))


class Outer(nn.Module):
    base_model_prefix = "model"

    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.model.first.weight


def filled(kind=Outer, seed=1):
    torch.manual_seed(seed)
    made = kind()
    with torch.no_grad():
        for param in made.parameters():
            param.normal_()
    return made


def load(model, source, **options):
    return sim.run(1, lambda world: load_weights(model, source, world.node, world.comm, **options))[0]


def refused(model, source, match, **options):
    with pytest.raises(CheckpointError, match=match):
        load(model, source, **options)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left.state_dict().values(), right.state_dict().values(), strict=True))


@pytest.mark.parametrize(("of", "into"), [(Inner, Outer), (Outer, Inner), (Outer, Outer)])
def test_prefixes_of_one_side_are_found(tmp_path, of, into):
    source, found = filled(of), filled(into, 2)
    torch.save({f"module.{name}": value for name, value in source.state_dict().items()}, tmp_path / "x.pt")
    assert load(found, tmp_path / "x.pt").unexpected == ()
    inner = [getattr(model, "model", model) for model in (source, found)]
    assert same(*inner)
    if into is Outer:
        assert found.head.weight is found.model.first.weight


def test_missing_and_unexpected_names_are_one_sentence(tmp_path):
    state = filled().state_dict()
    state["model.second.weigh"] = state.pop("model.second.weight")
    torch.save(state, tmp_path / "x.pt")
    text = r"no 'model.second.weight', of 5 tensors of the model, and 1 that the model has no place for, such as "
    refused(filled(), tmp_path / "x.pt", text + r"'model.second.weigh'. Did you mean \"model.second.weigh\"")
    torch.save({**filled().state_dict(), "other": torch.ones(1)}, tmp_path / "x.pt")
    assert load(filled(seed=2), tmp_path / "x.pt").unexpected == ("other",)


def test_another_shape_is_told_with_both(tmp_path):
    state = filled().state_dict()
    state["model.second.bias"] = torch.zeros(7)
    torch.save(state, tmp_path / "x.pt")
    refused(filled(), tmp_path / "x.pt", r"x.pt has 'model.second.bias' of shape \(7,\), and .* has \(6,\)")


def test_unaligned_and_transposed_tensors_are_read(tmp_path):
    source = filled()
    state = {name: value.clone() for name, value in source.state_dict().items() if name != "head.weight"}
    save_file({"a": torch.zeros(1, dtype=torch.int8), **state}, tmp_path / "x.safetensors")
    found = filled(seed=2)
    assert load(found, tmp_path / "x.safetensors").unexpected == ("a",)
    assert same(found, source)
    torch.save({**state, "model.first.weight": state["model.first.weight"].t().contiguous().t()}, tmp_path / "x.pt")
    found = filled(seed=3)
    load(found, tmp_path / "x.pt")
    assert same(found, source)


def test_truth_values_have_to_be_such(tmp_path):
    source = filled()
    state = {name: value.clone() for name, value in source.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(raw[:-3] + b"\2\0\0")
    refused(filled(), tmp_path / "x.safetensors", "a truth value is stored as 2")


class Known(nn.Module):
    """The names of `foreign_folders`, with a tied table."""

    def __init__(self):
        super().__init__()
        self.embed, self.a = nn.Embedding(13, 7), nn.Linear(7, 5)
        self.scale, self.norm = nn.Parameter(torch.zeros(())), nn.BatchNorm1d(7, affine=False)
        self.norm.weight = nn.Parameter(torch.zeros(7))
        self.norm.register_buffer("count", torch.tensor(0))
        self.norm.num_batches_tracked = None
        self.norm.running_var = None
        self.frozen, self.head = nn.Linear(5, 7, bias=False), nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("kind", ["grouped", "cut", "universal", "whole"])
def test_folders_of_deepspeed_are_read(tmp_path, monkeypatch, kind, mapped):
    monkeypatch.setattr("mpispeed.inference.weights.plan.LEAST_MAPPED_BYTES", 4)
    known = folders.Known()
    if kind in ("grouped", "cut"):
        getattr(folders, f"write_{kind}")(tmp_path, known, 3)
    else:
        getattr(folders, f"write_{kind}")(tmp_path, known)
    with torch.device("meta"):
        found = Known()
    found.head.weight = found.embed.weight
    options = (
        ReadOptions(weights_only=True, frozen="^frozen", buffers="running_mean|count") if kind == "whole" else None
    )
    load(found, tmp_path, dtype=torch.float32, mapped=mapped, options=options)
    weights = {name: known.slots[name, "master"] for name in known.names} | known.frozen | known.buffers
    for name, value in found.state_dict().items():
        if name != "head.weight":
            assert torch.equal(value, weights[name].to(value.dtype)), name


@pytest.mark.parametrize("mapped", [True, False])
def test_damaged_bytes_of_a_torch_file_are_found(tmp_path, monkeypatch, mapped):
    monkeypatch.setattr("mpispeed.inference.weights.plan.LEAST_MAPPED_BYTES", 4)
    source = filled()
    torch.save(source.state_dict(), tmp_path / "x.pt")
    raw = bytearray((tmp_path / "x.pt").read_bytes())
    raw[raw.index(source.model.second.weight.detach().numpy().tobytes()) + 9] ^= 4
    (tmp_path / "x.pt").write_bytes(raw)
    with torch.device("meta"):
        found = Outer()
    found.head.weight = found.model.first.weight
    refused(found, tmp_path / "x.pt", "x.pt is damaged: bytes .* do not match their checksum", mapped=mapped)


def test_compressed_entries_are_refused(tmp_path):
    torch.save(filled().state_dict(), tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as old,
        zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
    refused(filled(), tmp_path / "y.pt", "is compressed")


def test_a_copy_is_read_as_it_says_or_not_at_all(tmp_path):
    source = filled()
    sim.run(1, lambda world: save_sharded(source, tmp_path, world.comm))
    found = filled(seed=2)
    load(found, tmp_path)
    assert same(found, source)
    assert found.head.weight is found.model.first.weight
    (tmp_path / "latest").write_text("../weights")
    refused(filled(), tmp_path, "weights")


def test_memory_is_what_the_group_has_left(tmp_path):
    proc, group = tmp_path / "proc", tmp_path / "cgroup" / "job"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:   4000 kB\n")
    assert budget.available_bytes(proc) == 4000 << 10
    (proc / "self" / "cgroup").write_text("0::/job\n")
    (proc / "self" / "mountinfo").write_text(f"1 2 0:1 / {tmp_path / 'cgroup'} rw - cgroup2 cgroup2 rw\n")
    (group / "memory.max").write_text("3000000")
    (group / "memory.current").write_text("2000000")
    (group / "memory.stat").write_text("inactive_file 500000\n")
    assert budget.available_bytes(proc) == 1500000
    monkey = filled()
    torch.save(monkey.state_dict(), tmp_path / "x.pt")
    with torch.device("meta"):
        found = Outer()
    refused(found, tmp_path / "x.pt", "its budget is 0.0 MiB", budget=100)


def test_masks_as_large_as_a_config_says_are_counted_before_they_are_made(tmp_path):
    """A folder's config alone says how large they are: 30,000 positions are 0.8 GiB in each layer of a GPT-Neo."""
    sizes = {"max_position_embeddings": 30000, "hidden_size": 4, "num_layers": 2, "num_heads": 1, "vocab_size": 8}
    config = transformers.GPTNeoConfig(**sizes, attention_types=[[["global"], 2]])
    with torch.device("meta"):
        found = transformers.GPTNeoForCausalLM(config)
    values = {name: torch.zeros(each.shape) for name, each in found.state_dict().items() if name != "lm_head.weight"}
    path = tmp_path / "model.pt"
    torch.save(values, path)
    masks = sum(buffer.nbytes for name, buffer in found.named_buffers() if name.endswith(".bias"))
    assert masks > 1 << 30
    refused(found, path, r"and the buffers of the model take .* GiB on a rank", budget=masks)
    assert all(buffer.is_meta for buffer in found.buffers())
