"""Parameters that neighbouring data ranks do not have in common, as experts, beside ordinary ones in one table.

A rank's model has one `own` layer; the reference has those of all ranks, and each sample goes through that of its rank.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.distinct import mark_distinct
from mpispeed.base.errors import ConfigError, TopologyError, UsageError
from mpispeed.base.init_scope import paused
from mpispeed.engine.estimate.budget import gather_inputs, predict
from tests.zoo.training import ADAM, config, start

WIDTH, BATCH, STEPS = 24, 24, 4


class Mixed(nn.Module):
    """Common layers around a layer of the rank's own; `places` are the layers that a process has."""

    def __init__(self, places, ranks=None):
        super().__init__()
        self.places = list(places)
        self.first = layer(100, WIDTH, 3 * WIDTH)
        self.own = nn.ModuleList([layer(200 + place, 3 * WIDTH, WIDTH) for place in self.places])
        self.last = layer(300, WIDTH, 1)
        if ranks is not None:
            mark_distinct(self.own.parameters(), ranks)

    def forward(self, x, place):
        return self.last(torch.tanh(self.own[self.places.index(place)](torch.tanh(self.first(x))))).square()


def layer(seed, width, out):
    made = nn.Linear(width, out)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / math.sqrt(width))
    return made


def samples(step):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def reference(ranks, inner, *, accumulation=1, clip=0.0):
    """One process: the model with the layers of all ranks, its losses and norms."""
    model = Mixed(range(inner))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        parts = samples(step).chunk(ranks * accumulation)
        losses = [model(part, index % ranks % inner).mean() for index, part in enumerate(parts)]
        (sum(losses) / len(losses)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms


def trained(inner, stage, *, accumulation=1, clip=0.0, **more):
    """An engine after all steps, and its norms; the trace is of the last step."""
    rank = mpispeed.init_distributed().rank
    settings = config(stage, BATCH, accumulation, **{**ADAM, "gradient_clipping": clip, **more})
    engine = start(settings, Mixed([rank % inner], inner))
    norms = []
    for step in range(STEPS):
        engine.mesh.comm_trace.reset()
        parts = samples(step).chunk(engine.mesh.size * accumulation)
        for micro in range(accumulation):
            own = parts[micro * engine.mesh.size + rank].clone().requires_grad_()  # so that backward reads all weights
            engine.backward(engine(own, rank % inner).mean())
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return engine, norms


def divisors(count):
    return [size for size in range(2, count + 1) if count % size == 0]


def compare(engine, model, place):
    """Weights of this rank and those of the reference; Adam's steps amplify rounding where gradients are near 0."""
    names = {name: name.replace("own.0", f"own.{place}") for name, _ in engine.module.named_parameters()}
    wanted = dict(model.named_parameters())
    with mpispeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param, wanted[names[name]], rtol=1e-4, atol=1e-5)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("accumulation", "clip"), [(1, 0.0), (2, 0.05)])
def test_training_is_that_of_one_process_with_all_layers(stage, accumulation, clip):
    rank, ranks = mpispeed.init_distributed().rank, mpispeed.init_distributed().size
    for inner in divisors(ranks) or [1]:
        model, wanted = reference(ranks, inner, accumulation=accumulation, clip=clip)
        engine, norms = trained(inner, stage, accumulation=accumulation, clip=clip)
        assert norms == pytest.approx(wanted, rel=1e-4)
        compare(engine, model, rank % inner)
        engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_placements_are_those_of_the_ranks_with_copies():
    ranks = mpispeed.init_distributed().size
    for inner in divisors(ranks):
        engine, _ = trained(inner, 3)
        table, mesh = engine.parts.table, engine.mesh
        own = [unit for unit in table.units if unit.states.differs_over_data]
        assert [entry.name for unit in own for entry in unit.layout.entries] == ["own.0.weight", "own.0.bias"]
        for unit in table.units:
            over = ranks // inner if unit in own else ranks
            assert mesh.topology.group_size(unit.states.master.axes) == over
            assert engine.parts.params.shards.span(unit).numel * over == unit.layout.padded
        engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predictions_are_exact(stage):
    rank, ranks = mpispeed.init_distributed().rank, mpispeed.init_distributed().size
    for inner in divisors(ranks):
        engine, _ = trained(inner, stage, accumulation=2, reuse=0)
        budget = predict(gather_inputs(engine.parts.plan, Mixed([rank % inner], inner)))
        sent = {verb: engine.mesh.comm_trace.total_bytes(verb) for verb, _ in engine.mesh.comm_trace.entries()}
        assert {verb: size for verb, size in sent.items() if size} == {
            row.verb: budget.sent_bytes(row.verb) for row in budget.sent
        }
        params, optimization = engine.parts.params, engine.parts.optimization
        held = {
            "parameters": params.shards.param_bytes,
            "optimizer state": optimization.states.state_bytes,
            "gradients": optimization.grads.shards.rest_bytes,
        }
        assert {what: budget.bytes_of(what) for what in held} == held
        engine.destroy()


@pytest.mark.mpi(min_size=2)
def test_all_placements_have_one_norm():
    """Bits do not depend on the stage: sums are in rank order, and squares of blocks are added exactly."""
    inner = divisors(mpispeed.init_distributed().size)[0]
    found = []
    for stage in range(4):
        engine, norms = trained(inner, stage, reduction="ordered")
        found.append(norms)
        engine.destroy()
    assert found == [found[0]] * 4


@pytest.mark.mpi(min_size=2)
def test_norms_of_whole_parameters_are_sums_over_their_own_shards():
    """LAMB scales by norms of parameters: sharded, by sums over the ranks that share each, in another order."""
    inner = divisors(mpispeed.init_distributed().size)[0]
    found = []
    for stage in (0, 2):
        engine, _ = trained(inner, stage, optimizer={"type": "Lamb", "params": {"lr": 1e-2}})
        found.append([param.detach().clone() for param in engine.module.parameters()])
        engine.destroy()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.mpi(min_size=2)
def test_what_takes_all_data_ranks_for_equal_is_refused(tmp_path):
    ranks = mpispeed.init_distributed().size
    with pytest.raises(ConfigError, match="OneBitAdam takes means over all data ranks"):
        start(config(0, BATCH, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}), Mixed([0], ranks))
    engine, _ = trained(ranks, 2)
    with pytest.raises(UsageError, match=r"own\.0\.weight.*of its own on each"):
        engine.save_checkpoint(str(tmp_path))
    state = engine.module_state_dict()
    with pytest.raises(UsageError, match=r"own\.0\.weight.*of its own on each.*loaded"):
        engine.load_module_state_dict(state)
    engine.destroy()


@pytest.mark.mpi(min_size=1)
def test_marks_are_checked():
    too_many = mpispeed.init_distributed().size + 1
    with pytest.raises(TopologyError, match=f"ranks with parameters of their own = {too_many}"):
        start(config(0, BATCH, **ADAM), Mixed([0], too_many))
    model = Mixed([0], 2)
    with pytest.raises(UsageError, match="marked to differ over 2 ranks, not over 3"):
        mark_distinct(model.own.parameters(), 3)
    with pytest.raises(UsageError, match="whole number"):
        mark_distinct(model.own.parameters(), 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_paused", [True, False])
def test_inside_of_sharded_construction(is_paused):
    rank, ranks = mpispeed.init_distributed().rank, mpispeed.init_distributed().size
    with mpispeed.zero.Init(config_dict_or_path=config(3, BATCH)):
        model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH)})
        with paused() if is_paused else nullcontext():
            own = layer(rank, WIDTH, 1)
            mark_distinct(own.parameters(), ranks)
        model["own"] = own
        model = nn.Sequential(model["first"], model["own"])
    if not is_paused:
        with pytest.raises(UsageError, match=r"'1\.weight' is marked to differ.*paused"):
            start(config(3, BATCH, **ADAM), model)
        return
    engine = start(config(3, BATCH, **ADAM), model)
    with mpispeed.zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(model[1].weight, layer(rank, WIDTH, 1).weight)
    with mpispeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if rank == 1:
            with torch.no_grad():
                model[0].weight.fill_(1.0)
                model[1].weight.fill_(2.0)
    with mpispeed.zero.GatheredParameters(list(model.parameters())):
        assert bool((model[0].weight == 1.0).all())
        assert bool((model[1].weight == 2.0).all()) == (rank == 1)
    engine.destroy()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_keep_their_values(stage):
    rank, ranks = mpispeed.init_distributed().rank, mpispeed.init_distributed().size
    model = Mixed([rank], ranks)
    model.own.requires_grad_(False)
    engine = start(config(stage, BATCH, **ADAM), model)
    with mpispeed.zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(model.own[0].weight, layer(200 + rank, 3 * WIDTH, WIDTH).weight)
    engine.destroy()
