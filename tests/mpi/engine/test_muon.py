"""Muon beside every stage, slices, experts and places of states: as on one process with whole matrices."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError
from mpispeed.ckpt.slices import take_slice
from mpispeed.engine.matrices import slices_of
from mpispeed.engine.matrix_update import MatrixUpdate
from mpispeed.moe import MoE
from mpispeed.plan import matrix_owners
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.muon import HYPER, PlainMuon, is_hidden
from tests.zoo import same_bits
from tests.zoo.models import BATCH, Mlp, Net, TinyLM, samples
from tests.zoo.training import config, start, train, train_plain, weights

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = 20
MUON = {"optimizer": {"type": "Muon", "params": {**HYPER}}}
OFFLOAD = {
    "none": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme", "buffer_count": 4}, "sub_group_size": 4096},
}
# Sums of gradients are ordered otherwise, and the iteration amplifies the difference by up to 485 where a direction is
# nearly zero: of 20 steps of lr 0.02 remain 1e-5.
NEAR = {"rtol": 1e-5, "atol": 1e-5}


class Deep(nn.Module):
    """Ten layers, some longer than a page of a swap file, that form a unit each."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(8, 48)
            self.layers = nn.ModuleList(nn.Linear(48, 48 if at % 3 else 96) if at % 3 != 1 else nn.Linear(96, 48)
                                        for at in range(6))  # fmt: skip
            self.last = nn.Linear(48, 4)

    def forward(self, x, y):
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.last(x).float(), y)


def data(steps=STEPS, width=8, out=4):
    random = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, width, generator=random), torch.randn(BATCH, out, generator=random))
            for _ in range(steps)]  # fmt: skip


def on_disk(settings, path):
    where = settings["zero_optimization"].get("offload_optimizer", {})
    if where.get("device") == "nvme":
        where["nvme_path"] = str(path / "disk")
    return settings


def check_near(engine, plain):
    found = weights(engine)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), **NEAR)


def update_of(engine):
    parts = engine.mpispeed.parts.updates._parts
    return next(part for part in parts if isinstance(part, MatrixUpdate))


@pytest.mark.parametrize(("stage", "where"), on_ranks([0, 1, 2, 3], ["none", "cpu", "nvme"]))
def test_equals_one_process(stage, where, mpi_tmp_path, monkeypatch):
    if stage == 0 and where != "none":
        stage = 1
    monkeypatch.setattr(matrix_owners.rounds_of, "__kwdefaults__", {"least": 1})  # a round for each unit
    monkeypatch.setattr(matrix_owners, "MATRICES_UNDER_WAY", 0)
    zero = {**OFFLOAD[where], "stage3_param_persistence_threshold": 0}  # no unit is put together with another
    settings = config(stage, zero=zero, reuse=0 if stage == 3 else None, **MUON)
    engine, plain = start(on_disk(settings, mpi_tmp_path), Deep()), Deep()
    assert len(update_of(engine)._rounds) > 2
    rows = data()
    train(engine, rows)
    train_plain(plain, rows, PlainMuon(plain, is_hidden, **HYPER))
    check_near(engine, plain)
    engine.destroy()


POLICY = {"first": "column", "middle": "row"}
SLICED = {2: [(0, "none"), (3, "nvme")], 4: [(0, "none"), (1, "nvme"), (2, "none"), (3, "cpu")]}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("number", range(4))
def test_slices_are_whole_to_their_owner(number, mpi_tmp_path):
    """Two slices, of rows of one matrix and of columns of another, on 4 ranks with two shards of each."""
    cases = SLICED[mpispeed.init_distributed().size]
    stage, where = cases[number % len(cases)]
    slices = {"autotp_size": 2, "injection_policy_tuple": POLICY}
    settings = on_disk(config(stage, BATCH, 1, zero=OFFLOAD[where], tensor_parallel=slices, **MUON), mpi_tmp_path)
    engine, plain = start(settings, Mlp()), Mlp()
    rows = data()
    train(engine, rows)
    train_plain(plain, rows, PlainMuon(plain, is_hidden, **HYPER))
    found, cuts = weights(engine), slices_of(engine.module, 2)
    assert set(cuts) >= {"first.weight", "middle.weight"}
    for name, param in plain.named_parameters():
        expected = param.detach()
        if name in cuts:
            expected = torch.empty_like(found[name]).view(-1)
            take_slice(cuts[name][engine.mpispeed.parts.mesh.index("model")], param.detach().contiguous(), expected)
            expected = expected.view_as(found[name])
        torch.testing.assert_close(found[name], expected, **NEAR)
    engine.destroy()


@pytest.mark.parametrize("dtype", in_turn(["bf16", "fp16", "fp32"]))
def test_stages_and_places_have_the_same_bits(dtype, mpi_tmp_path):
    """Sums in the order of ranks, one micro-batch: what remains is what an owner does, which is the same for all."""
    found = []
    whole = [(0, "none")] if dtype == "fp32" else []  # whose sums of 16 bits are in another order, with AdamW too
    for stage, where in (*whole, (1, "cpu"), (2, "nvme"), (3, "none")):
        more = {"reduction": "ordered", "gradient_clipping": 0.5, "dtype": dtype}
        engine = start(on_disk(config(stage, BATCH, 1, zero=OFFLOAD[where], **more, **MUON), mpi_tmp_path), Deep())
        train(engine, data(3))
        found.append(weights(engine))
        engine.destroy()
    for other in found[1:]:
        same_bits(other, found[0])


class Mixed(nn.Module):
    """A convolution, a stack of matrices, and matrices of bf16 iteration by name of no importance."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.conv = nn.Conv1d(1, 6, 3)
            self.stack = nn.Parameter(torch.randn(5, 6, 4) / 3)
            self.last = nn.Linear(20, 4)

    def forward(self, x, y):
        x = self.conv(x.unsqueeze(1)).mean(2)
        x = torch.einsum("bi,nio->bno", x, self.stack).flatten(1)
        return nn.functional.mse_loss(self.last(torch.tanh(x)), y)


@pytest.mark.parametrize("stage", in_turn([0, 2, 3]))
def test_stacks_and_convolutions(stage):
    engine, plain = start(config(stage, **MUON), Mixed()), Mixed()
    names = {matrix.name for group in update_of(engine).found for matrix in group.matrices}
    assert names == {"conv.weight", *(f"stack[{at}]" for at in range(5)), "last.weight"}
    rows = data(6)
    train(engine, rows)

    train_plain(plain, rows, PlainMuon(plain, is_hidden, flat=[plain.conv.weight], **HYPER))
    check_near(engine, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", in_turn([1, 3]))
def test_matrices_have_no_second_moments_and_resume(stage, mpi_tmp_path):
    """Saved at one stage, loaded at another, in files; embeddings and vectors have Adam's states."""
    settings = config(stage, **MUON)
    engine = start(settings, TinyLM())
    tokens = torch.randint(61, (4, BATCH, 9), generator=torch.Generator().manual_seed(3))
    train(engine, tokens[:2])
    states = engine.mpispeed.parts.optimization.state.states
    for unit in engine.mpispeed.parts.table.units:
        is_table = any(entry.name == "embed.weight" for entry in unit.layout.entries)
        is_matrix = not is_table and any(len(entry.shape) == 2 for entry in unit.layout.entries)
        assert set(states.tensors(unit)) == ({"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq"})
    engine.save_checkpoint(str(mpi_tmp_path / "saved"))
    engine.destroy()
    results = []
    for other in (stage, 2 if stage == 1 else 1):
        again = config(other, reduction="ordered", zero=OFFLOAD["nvme"] if other == 2 else {}, **MUON)
        engine = start(on_disk(again, mpi_tmp_path), TinyLM(seed=8))
        engine.load_checkpoint(str(mpi_tmp_path / "saved"))
        train(engine, tokens[2:])
        results.append(weights(engine))
        engine.destroy()
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-6, atol=1e-6)
    reference = TinyLM()
    plain = PlainMuon(reference, lambda name, param: param.dim() == 2 and name != "embed.weight", **HYPER)
    train_plain(reference, tokens, plain)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(results[0][name], param.detach(), **NEAR)


def test_zero_init_has_its_matrices():
    """DeepSpeed's pull request 8438: shapes of parameters that are cut are not those of their layers."""
    found = []
    for is_inside in (False, True):
        settings = config(3, **MUON)
        if is_inside:
            with mpispeed.zero.Init(config_dict_or_path=settings):
                model = Net()
        else:
            model = Net()
        engine = start(settings, model)
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [2, 4]
        train(engine, samples(3))
        found.append(weights(engine))
        engine.destroy()
    same_bits(found[1], found[0])


class Routed(nn.Module):
    """A layer of experts between two."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(6)
            self.first = nn.Linear(8, 8)
            expert = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
            self.experts = MoE(8, expert, num_experts=4, ep_size=ep_size, k=1, capacity_factor=8.0, use_rts=False)
            self.last = nn.Linear(8, 4)

    def forward(self, x, y):
        x, loss, _ = self.experts(torch.tanh(self.first(x)))
        return nn.functional.mse_loss(self.last(x), y) + 0.01 * loss


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 2])
def test_experts_are_owned_by_the_ranks_that_have_them(stage):
    results = []
    for ep_size in (1, 2):
        engine = start(config(stage, BATCH, 1, **MUON), Routed(ep_size))
        groups = update_of(engine).found
        names = [matrix.name for group in groups for matrix in group.matrices if "deepspeed_experts" in matrix.name]
        assert len(names) >= 8 // ep_size
        sizes = {
            len(group.members) for group in groups if any("deepspeed_experts" in one.name for one in group.matrices)
        }
        assert sizes == {mpispeed.init_distributed().size // ep_size}
        losses = train(engine, data(8))
        results.append(losses)
        engine.destroy()
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=1e-4, atol=1e-4)


def test_vectors_are_refused_on_all_ranks():
    model = Net()
    model.first.bias.use_muon = True
    with pytest.raises(ConfigError, match=r"first\.bias.*use_muon true"):
        start(config(1, **MUON), model)
