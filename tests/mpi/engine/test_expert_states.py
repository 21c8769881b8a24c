"""Optimizer state of experts in checkpoints: of torch's optimizers, and parameter groups that set experts apart."""

import copy
import math

import pytest
import torch
from torch import nn

from mpispeed.base.errors import CheckpointError, UsageError, ZeRORuntimeException
from mpispeed.checkpoints import open_checkpoint
from mpispeed.ckpt.tools.importing import import_checkpoint
from mpispeed.moe import MoE
from mpispeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from tests.helpers.covering import in_turn, on_ranks
from tests.helpers.experts import HIDDEN, Block
from tests.unit.ckpt import foreign_experts
from tests.zoo.training import ADAM, config, own_part, start, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

EXPERTS, BATCH = 4, 12
UNTESTED = {"zero_allow_untested_optimizer": True}
CLIENTS = {
    "NAdam": lambda params: torch.optim.NAdam(params, 0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, 0.01),
    "SGD": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, 0.01),
}


class Net(nn.Module):
    """Numbered and fused experts, one behind the other."""

    def __init__(self, ep_size):
        super().__init__()
        torch.manual_seed(2)
        self.first = MoE(HIDDEN, Block(), num_experts=EXPERTS, drop_tokens=False, ep_size=ep_size)
        gate = Router(HIDDEN, EXPERTS, RouterOptions(k=2))
        self.second = RoutedExperts(gate, SwiGLUExperts(HIDDEN, 5, EXPERTS), ep_size=ep_size)

    def forward(self, x, y):
        return (self.second(self.first(x)[0])[0] - y).square().mean()


def data(count=4):
    make = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, BATCH, 2, HIDDEN, generator=make)) for _ in range(count)]


def sizes(comm):
    """Sizes of groups of experts; of 4 experts on 3 ranks the first has two."""
    return [size for size in range(1, comm.size + 1) if comm.size % size == 0]


def divisors(comm):
    """Sizes with as many experts on every rank, as groups that are cut between experts need."""
    return [size for size in sizes(comm) if EXPERTS % size == 0]


def content(path):
    """Every tensor, and the scalars of every parameter, of a checkpoint."""
    opened = open_checkpoint(path.parent, path.name)
    tensors = {(name, slot): opened.read_whole(name, slot) for name in opened.names() for slot in opened.slots(name)}
    tree = opened.state()["optimizer"]["scalars"]["of_params"]
    runs = {}
    for name, first, index in zip(tree["names"], tree["starts"], tree["indices"], strict=True):
        runs.setdefault(name, []).append((first, repr(tree["sets"][index])))
    return tensors, runs


def check_same(one, two):
    (first, counts), (second, others) = content(one), content(two)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
    assert {name: {text for _, text in rows} for name, rows in counts.items()} == {
        name: {text for _, text in rows} for name, rows in others.items()
    }


@pytest.mark.parametrize(("name", "stage", "later"), in_turn([
    ("NAdam", 0, 2), ("NAdam", 3, 0), ("RAdam", 1, 3), ("SGD", 2, 1), ("SGD", 0, 0), ("Adafactor", 0, 0),
]))  # fmt: skip
def test_optimizers_of_torch_go_on_with_any_groups(comm, mpi_tmp_path, name, stage, later):
    found = sizes(comm)
    for ep_size, other in zip(found, [*found[1:], found[0]], strict=True):
        if name == "Adafactor":  # its factors are of whole tensors
            other = ep_size = 1
        losses = []
        for saves in (True, False):
            model = Net(ep_size)
            engine = start(config(stage, BATCH, 1, **UNTESTED), model, optimizer=CLIENTS[name](model.parameters()))
            if saves:
                train_averaged(engine, data()[:2])
                engine.save_checkpoint(str(mpi_tmp_path), tag=f"ep{ep_size}")
            else:
                engine.load_checkpoint(str(mpi_tmp_path), tag=f"ep{ep_size}")
            losses.append(train_averaged(engine, data()[2:]))
            engine.destroy()
        assert losses[0] == losses[1]
        model = Net(other)
        again = start(config(later, BATCH, 1, **UNTESTED), model, optimizer=CLIENTS[name](model.parameters()))
        again.load_checkpoint(str(mpi_tmp_path), tag=f"ep{ep_size}")
        again.save_checkpoint(str(mpi_tmp_path), tag="again")
        check_same(mpi_tmp_path / "again", mpi_tmp_path / f"ep{ep_size}")
        assert train_averaged(again, data()[2:]) == pytest.approx(losses[0], rel=1e-5)
        again.destroy()


@pytest.mark.ranks(2, 3)
def test_factors_of_parts_of_fused_experts_start_afresh(comm, mpi_tmp_path):
    """Those of whole tensors go on; of the others nothing is taken, as Adafactor cannot go on from its count alone."""
    for number, (ep_size, other) in enumerate(((comm.size, comm.size), (comm.size, 1), (1, comm.size))):
        models = Net(ep_size), Net(other)
        tags = [f"{number}{end}" for end in "ab"]
        for place, model in enumerate(models):
            engine = start(config(0, BATCH, 1, **UNTESTED), model, optimizer=CLIENTS["Adafactor"](model.parameters()))
            if place:
                engine.load_checkpoint(str(mpi_tmp_path), tag=tags[0])
            else:
                train_averaged(engine, data()[:2])
            engine.save_checkpoint(str(mpi_tmp_path), tag=tags[place])
            assert all(map(math.isfinite, train_averaged(engine, data()[2:])))
            engine.destroy()
        (first, counts), (second, others) = (content(mpi_tmp_path / tag) for tag in tags)
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
        fused = {name for name in counts.keys() | others.keys() if name.startswith("second.experts")}
        assert not fused if ep_size > 1 else len(fused) == 2
        assert not any(name in others for name in fused)
        assert {name: rows for name, rows in counts.items() if name not in fused} == others


def uneven(model):
    """Groups of experts of at most three parameters: another number of them for each ep_size."""
    params = {"params": list(model.parameters()), "name": "all", "lr": 0.02, "weight_decay": 0.1}
    return split(params, max_group_size=3 * HIDDEN * 5)


@pytest.mark.parametrize("stage", on_ranks([0, 2, 3]))
def test_groups_that_are_cut_otherwise_keep_their_numbers(comm, mpi_tmp_path, stage):
    """Groups of experts are as many as the experts of a rank need; the optimizer of the config has one."""
    settings = config(stage, BATCH, 1, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    model = Net(divisors(comm)[-1])
    engine = start(settings, model, model_parameters=uneven(model))
    train_averaged(engine, data()[:1])
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.005
    engine.save_checkpoint(str(mpi_tmp_path), tag="one")
    wanted = train_averaged(engine, data()[1:])
    engine.destroy()
    for ep_size in divisors(comm):
        for is_cut in (True, False):
            model = Net(ep_size)
            given = {"model_parameters": uneven(model)} if is_cut else {}
            again = start(copy.deepcopy(settings), model, **given)
            again.load_checkpoint(str(mpi_tmp_path), tag="one")
            assert {(group["lr"], group["weight_decay"]) for group in again.optimizer.param_groups} == {(0.005, 0.1)}
            assert train_averaged(again, data()[1:]) == pytest.approx(wanted, rel=1e-5)
            again.destroy()


def test_groups_that_are_cut_otherwise_and_have_different_numbers_are_refused(comm, mpi_tmp_path):
    settings = config(1, BATCH, 1, optimizer={"type": "AdamW", "params": {"lr": 0.01}})
    model = Net(1)
    groups = uneven(model)
    groups[-1]["lr"] = 0.5
    engine = start(settings, model, model_parameters=groups)
    engine.save_checkpoint(str(mpi_tmp_path), tag="one")
    engine.destroy()
    again = start(settings, Net(divisors(comm)[-1]))
    with pytest.raises(ZeRORuntimeException, match="group the parameters alike"):
        again.load_checkpoint(str(mpi_tmp_path), tag="one")
    again.destroy()


@pytest.mark.parametrize("stage", on_ranks([0, 2, 3]))
def test_state_dicts_have_all_experts_in_and_out(comm, stage):
    for ep_size in sizes(comm):
        engine = start(config(stage, BATCH, 1, **ADAM), Net(ep_size))
        train_averaged(engine, data()[:2])
        given = engine.module_state_dict()
        whole = Net(1)
        # where nothing is cut, every rank has the state dict
        assert set(given) == (set(whole.state_dict()) if comm.rank == 0 or (ep_size == 1 and stage < 3) else set())
        given = comm.share({name: value.detach().numpy() for name, value in given.items()})
        given = {name: torch.from_numpy(value) for name, value in given.items()}
        whole.load_state_dict(given)
        whole.eval()
        with torch.no_grad():
            wanted = [float(whole(*batch)) for batch in data()[2:]]
        for other in sizes(comm):
            again = start(config(stage, BATCH, 1, **ADAM), Net(other))
            train_averaged(again, data()[:1])
            again.load_module_state_dict(given if comm.rank == 0 else {})
            again.eval()
            assert [averaged(again, batch) for batch in data()[2:]] == pytest.approx(wanted, rel=1e-6)
            twice = again.module_state_dict()
            assert twice.keys() == given.keys() or (not twice and comm.rank)
            assert all(torch.equal(value, given[name]) for name, value in twice.items() if name in given)
            again.destroy()
        engine.destroy()


def averaged(engine, batch):
    """The mean loss of all ranks' parts of a batch."""
    comm = engine.mpispeed.parts.mesh["data"]
    with torch.no_grad():
        loss = engine(*own_part(engine, batch)).double().reshape(1) / comm.size
    comm.all_reduce(loss)
    return float(loss)


@pytest.mark.ranks(2, 4)
def test_state_dicts_that_do_not_fit_are_told(comm):
    engine = start(config(2, BATCH, 1, **ADAM), Net(comm.size))
    before, state = weights(engine), Net(1).state_dict()
    first = next(name for name in state if "deepspeed_experts.3" in name)
    lacking = {name: value for name, value in state.items() if name != first}
    part = state["second.experts.down_proj"][:1]
    for given, text in (
        (lacking, f"lacks {first}"),
        (state | {"second.experts.down_proj": part}, r"down_proj has shape \(4, "),
        (state | {first.replace(".3.", ".4."): state[first]}, "unknown"),
    ):
        with pytest.raises(CheckpointError, match=text):
            engine.load_module_state_dict(given)
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    engine.load_module_state_dict({first: state[first] + 1}, strict=False)
    if comm.rank == comm.size - 1:
        assert torch.equal(weights(engine)[first], state[first] + 1)
    else:
        weights(engine)
    with pytest.raises(UsageError, match="without a custom_load_fn"):
        engine.load_module_state_dict(state, custom_load_fn=lambda src, dst: None)
    engine.destroy()


class Theirs(nn.Module):
    """The model of `foreign_experts.Mixture`."""

    def __init__(self, ep_size):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(5, 3, bias=False)
        self.a.bias = nn.Parameter(torch.zeros(5))
        self.m1 = MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=min(ep_size, 2))
        second = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False))
        self.m2 = MoE(4, second, num_experts=4, ep_size=ep_size)


@pytest.mark.parametrize(("ranks", "ep", "stage"), on_ranks([2, 4], [1, 2], [0, 1, 3], ranks=(1, 2, 4)))
def test_an_engine_takes_an_imported_mixture(comm, mpi_tmp_path, ranks, ep, stage):
    known = foreign_experts.Mixture(torch.float32)
    if comm.rank == 0:
        foreign_experts.write_partitioned(mpi_tmp_path / "theirs", known, ranks, ep)
        import_checkpoint(mpi_tmp_path / "theirs", mpi_tmp_path / "ours", tag="one")
    comm.barrier()
    engine = start(config(stage, 8, 1, optimizer={"type": "AdamW", "params": {"lr": 1.0}}), Theirs(comm.size))
    engine.load_checkpoint(str(mpi_tmp_path / "ours"), tag="one")
    assert engine.global_steps == known.steps
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-3]
    engine.save_checkpoint(str(mpi_tmp_path / "ours"), tag="two")
    opened = open_checkpoint(mpi_tmp_path / "ours", "two")
    for (name, slot), tensor in known.slots.items():
        assert torch.equal(opened.read_whole(name, slot), tensor), (name, slot)
    engine.destroy()
