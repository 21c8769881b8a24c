"""Loads of experts in monitors, the log and biases: those of the routing itself, summed over all ranks."""

import csv
import logging

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from mpispeed.checkpointing import checkpoint
from mpispeed.moe import MoE
from mpispeed.nn.expert import RoutedExperts, Router, RouterOptions, SwiGLUExperts
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from tests.helpers.experts import HIDDEN, Block
from tests.helpers.feature_models import SHAPE, gpt_layers, layers
from tests.helpers.tensor import assert_near
from tests.zoo.training import ADAM, config, own_part, start, weights

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, STEPS, EXPERTS = 24, 2, 4
LAYERS = ("first.deepspeed_moe", "second")


class Net(nn.Module):
    """Layers of experts that drop choices and that do not; the routings of training passes are kept."""

    def __init__(self, ep_size=1, *, recomputes=False, bias_rate=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.first = MoE(HIDDEN, Block(), EXPERTS, ep_size, capacity_factor=0.5, min_capacity=1, use_rts=False)
        router = Router(HIDDEN, EXPERTS, RouterOptions(k=2, bias_rate=bias_rate))
        self.second = RoutedExperts(router, SwiGLUExperts(HIDDEN, 5, EXPERTS), ep_size=ep_size)
        self.recomputes, self.routings = recomputes, []
        for gate in (self.first.deepspeed_moe.gate, router):
            gate.register_forward_hook(lambda gate, _, routing: self.routings.append((gate.training, routing)))

    def forward(self, x, y):
        run = checkpoint if self.recomputes else lambda function, x: function(x)
        hidden = run(lambda x: self.first(x)[0], x)
        return (run(lambda x: self.second(x)[0], hidden) - y).square().mean()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, BATCH, 3, HIDDEN, generator=generator).unbind() for _ in range(STEPS)]


def sections(folder, name):
    section = {"enabled": True, "output_path": str(folder), "job_name": name}
    return {"csv_monitor": section, "tensorboard": section}


def trained(settings, model, batches):
    """An engine after its steps, between which it is evaluated."""
    engine = start(settings, model)
    for batch in batches:
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*own_part(engine, batch, micro)))
            engine.step()
        with torch.no_grad():
            engine.eval()(*own_part(engine, batch))
        engine.train()
    return engine


def loads_of(comm, model, layer):
    """Choices and dropped choices of each step, of all ranks."""
    passes = [routing for is_training, routing in model.routings[layer::2] if is_training]
    counted = torch.zeros(STEPS, 2, EXPERTS, dtype=torch.int64)
    for number, routing in enumerate(passes):
        for expert in range(EXPERTS):
            chosen = routing.experts == expert
            dropped = torch.zeros_like(chosen) if routing.kept is None else chosen & ~routing.kept
            counted[number * STEPS // len(passes), :, expert] += torch.stack([chosen.sum(), dropped.sum()])
    comm.all_reduce(counted)
    return counted


def read_csv(path):
    with path.open() as file:
        return [(int(x), float(value)) for x, value in list(csv.reader(file))[1:]]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_series_are_those_of_the_routing(comm, mpi_tmp_path, accumulation):
    ep_size = comm.size
    if EXPERTS % ep_size:
        ep_size = 1
    models = [Net(ep_size, recomputes=recomputes) for recomputes in (False, True)]
    for model in models:
        settings = config(2, BATCH, accumulation, **sections(mpi_tmp_path, str(model.recomputes)), **ADAM)
        trained(settings, model, data()).destroy()
    found = [loads_of(comm, models[0], layer) for layer in range(2)]
    if comm.rank == 0:
        for model in models:
            check_files(mpi_tmp_path / str(model.recomputes), found)
    assert int(found[0][:, 1].sum()) > 0
    assert int(found[1][:, 1].sum()) == 0
    assert found[1][:, 0].sum(-1).tolist() == [BATCH * 3 * 2] * STEPS


def check_files(folder, found):
    events = EventAccumulator(str(folder))
    events.Reload()
    for layer, loads in zip(LAYERS, found, strict=True):
        chosen, dropped = loads.double().unbind(1)
        share = chosen / chosen.mean(1, keepdim=True)
        expected = {f"expert_load_{number}": share[:, number] for number in range(EXPERTS)} | {
            "expert_max_load": share.amax(1),
            "expert_min_load": share.amin(1),
            "expert_dropped": dropped.sum(1) / chosen.sum(1),
        }
        for series, values in expected.items():
            points = [(BATCH * (step + 1), pytest.approx(float(value))) for step, value in enumerate(values)]
            assert read_csv(folder / f"Train_Samples_{layer}_{series}.csv") == points, series
            shown = events.Scalars(f"Train/Samples/{layer}/{series}")
            assert [(event.step, event.value) for event in shown] == points, series


@pytest.mark.ranks(2, 3)
def test_loads_are_one_message_of_a_step(comm, mpi_tmp_path):
    calls, watched = [], sections(mpi_tmp_path, "run")
    for settings, bias_rate in (({"steps_per_print": 0}, 0.0), (watched, 0.0), (watched, 0.01)):
        engine = trained(config(0, BATCH, 2, **settings, **ADAM), Net(bias_rate=bias_rate), data())
        entries = engine.mpispeed.parts.mesh.comm_trace.entries()
        calls.append(sum(entry.count for (verb, _), entry in entries.items() if verb == "all_reduce"))
        engine.destroy()
    assert [count - calls[0] for count in calls] == [0, STEPS, STEPS]


def test_the_log_names_the_busiest_expert(comm, caplog):
    model = Net()
    with torch.no_grad():
        model.second.gate.wg.weight.zero_()  # equal scores: the first experts
    with caplog.at_level(logging.INFO, "mpispeed.engine.expert_loads"):
        trained(config(1, BATCH, 1, steps_per_print=2, optimizer={"type": "SGD", "params": {"lr": 0.0}},
                       zero_allow_untested_optimizer=True), model, data()).destroy()  # fmt: skip
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("experts |")]
    loads = [loads_of(comm, model, layer) for layer in range(2)]
    first = loads[0][1, 0].double()
    if comm.rank == 0:
        busiest = max(2.0, float(first.max() / first.mean()))
        assert len(told) == 1
        assert f"{busiest:.2f} x the mean" in told[0]
        assert f"dropped {int(loads[0][1, 1].sum())} of {BATCH * 3 * 3} choices" in told[0]
    else:
        assert not told


@pytest.mark.ranks(2, 4)
def test_layers_of_later_pipeline_stages_are_named(comm, mpi_tmp_path):
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=comm.size // 2)
    made = layers(ep_size=comm.size // 2)
    model = PipelineModule(made, topology=topology, loss_fn=gpt_layers.cross_entropy, partition_method="uniform")
    engine = start(config(1, BATCH, 2, **sections(mpi_tmp_path, "run"), **ADAM), model)
    tokens = (torch.arange(SHAPE.block + 1) + torch.arange(BATCH)[:, None] * 7) % 256
    batch = tokens[:, :-1], tokens[:, 1:]
    engine.train_batch(iter([own_part(engine, batch, micro) for micro in range(2)]))
    engine.destroy()
    if comm.rank == 0:
        files = list((mpi_tmp_path / "run").glob("*expert_load_*.csv"))
        assert len(files) == 4
        assert sum(read_csv(file)[0][1] for file in files) == pytest.approx(4.0)


class Balanced(nn.Module):
    """A layer of experts whose balance loss is part of the loss."""

    def __init__(self, ep_size=1, **options):
        super().__init__()
        torch.manual_seed(3)
        gate = Router(HIDDEN, EXPERTS, RouterOptions(k=2, **options))
        self.layer = RoutedExperts(gate, SwiGLUExperts(HIDDEN, 5, EXPERTS), ep_size=ep_size)

    def forward(self, x, y):
        hidden, routing = self.layer(x)
        return (hidden - y).square().mean() + 0.5 * routing.balance_loss


@pytest.mark.parametrize("recomputes", [False, True])
def test_the_global_balance_loss_trains_as_one_process(comm, recomputes):
    settings = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine = start(config(1, BATCH, 1, **settings), Balanced(global_balance=True))
    whole = Balanced()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1)
    for x, y in data():
        part = own_part(engine, (x, y))
        engine.backward(checkpoint(engine, *part) if recomputes else engine(*part))
        engine.step()
        whole(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = weights(engine)
    for name, param in whole.named_parameters():
        assert_near(found[name], param.detach(), 1e-5, name)
    engine.destroy()
    assert engine.module.layer.gate.balance_group is None
