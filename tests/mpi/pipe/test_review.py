"""What stages do in different orders, or some of them not at all, gives right numbers or one message for all."""

import pytest
import torch
from torch import nn

import mpispeed
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.mesh import Mesh, Topology
from mpispeed.nn.tensor import ColumnLinear, RowLinear
from mpispeed.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology, ProcessTopology, TiedLayerSpec
from tests.helpers.own_cut import Cut, Mpu
from tests.zoo.models import Residual

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.ranks(2)]
WIDTH, MICRO_BATCHES = 6, 4


def square(outputs, labels):
    return ((outputs - labels) ** 2).mean()


def linear(**settings):
    return LayerSpec(nn.Linear, WIDTH, WIDTH, **settings)


def tied(key):
    return TiedLayerSpec(key, nn.Linear, WIDTH, WIDTH)


def module(layers, stages=2, **settings):
    settings = {"num_stages": stages} | settings
    return PipelineModule(layers, loss_fn=square, seed_layers=True, partition_method="uniform", **settings)


def config(stage=0, **others):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    } | others


def pairs(step):
    generator = torch.Generator().manual_seed(step)
    return [tuple(torch.randn(2, 2, WIDTH, generator=generator)) for _ in range(MICRO_BATCHES)]


def train(engine, steps=3):
    return [float(engine.train_batch(iter(pairs(step)))) for step in range(steps)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_ties_that_stages_meet_in_another_order(stage, world):
    layers = [tied("first"), tied("second"), LayerSpec(nn.Tanh), linear(), tied("second"), tied("first")]
    whole, optimizer = by_hand(layers)
    expected = []
    for step in range(3):
        total = 0.0
        for x, y in pairs(step):
            for part in whole:
                x = part(x)
            loss = square(x, y) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    engine = mpispeed.initialize(model=module(layers), config=config(stage))[0]
    assert train(engine) == pytest.approx(expected, rel=1e-5)
    engine.destroy()


def by_hand(layers):
    """The layers in this process, as a pipeline seeds them, with tied ones made once."""
    made, whole = {}, []
    for index, spec in enumerate(layers):
        torch.manual_seed(1234 + index)
        key = getattr(spec, "key", None)
        part = made.get(key) if key else None
        if part is None:
            part = spec.build()
        if key:
            made.setdefault(key, part)
        whole.append(part)
    return whole, torch.optim.AdamW(nn.ModuleList(whole).parameters(), lr=0.01, weight_decay=0.0)


def test_a_config_that_differs_between_stages_is_refused(world):
    made = module([linear() for _ in range(4)])
    with pytest.raises(ConfigError, match=r"ranks \[1\] have another plan than rank 0"):
        mpispeed.initialize(model=made, config=config(gradient_accumulation_steps=2 + 2 * made.stage_id))


def test_parameter_groups_that_differ_between_stages_are_refused(world):
    made = module([linear(), linear(), linear(bias=False), linear(bias=False)])
    params = [*made.parameters()]
    groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim == 1]}]
    some = [group for group in groups if group["params"]]
    with pytest.raises(ConfigError, match=r"groups of stage 1 are not those of stage 0 \(1 and 2,.*empty list"):
        mpispeed.initialize(model=made, model_parameters=some, config=config())
    engine = mpispeed.initialize(model=made, model_parameters=groups, config=config())[0]
    assert all(loss > 0 for loss in train(engine, 1))
    engine.destroy()


def test_a_tied_weight_frozen_on_one_stage_is_refused(world):
    made = module([tied("key"), linear(), linear(), tied("key")])
    if made.stage_id == 0:
        made.tied_modules["key"].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"tied_modules.key.weight are frozen on one of their stages"):
        mpispeed.initialize(model=made, config=config())


def test_an_optimizer_in_code_of_a_stage_without_parameters(world):
    def run(optimizer=None):
        made = module([linear(), linear(), LayerSpec(nn.Tanh), LayerSpec(nn.Tanh)])
        engine = mpispeed.initialize(model=made, optimizer=optimizer, config=config())[0]
        losses = train(engine)
        engine.destroy()
        return losses

    own = run()
    given = run(lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0))
    assert given == pytest.approx(own, rel=1e-5)


def test_an_optimizer_that_one_stage_cannot_make_is_told_to_all(world):
    wanted = "no such thing"

    def make(params):
        if world.rank == 1:
            raise ValueError(wanted)
        return torch.optim.AdamW(params)

    with pytest.raises(ValueError, match=wanted):
        mpispeed.initialize(model=module([linear() for _ in range(4)]), optimizer=make, config=config())


@pytest.mark.ranks(4)
def test_axes_in_the_order_of_the_topology(world):
    made = module([linear() for _ in range(4)], topology=ProcessTopology(["data", "pipe"], [2, 2]), num_stages=None)
    engine = mpispeed.initialize(model=made, config=config())[0]
    assert (engine.stage_id, engine.mesh.index("data")) == (made.stage_id, made.grid.data_parallel_id)
    assert engine.stage_id == world.rank % 2
    assert train(engine)[2] > 0
    engine.destroy()


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_split_backward_passes_under_autocast(kind, world):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH) if kind == "linear" else nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x[:, None])[:, 0].float()

    found = []
    for schedule in ("1f1b", "zb-h1"):
        made = module([LayerSpec(Half) for _ in range(4)])
        engine = mpispeed.initialize(model=made, config=config(pipeline={"schedule": schedule}))[0]
        found.append(train(engine))
        engine.destroy()
    assert found[0] == found[1]


def test_recomputation_that_a_config_asks_for_ends_with_its_engine(world):
    made = module([linear() for _ in range(4)])
    given = made.activation_checkpoint_func
    for interval in (1, 0):
        asked = config(
            pipeline={"activation_checkpoint_interval": interval}, activation_checkpointing={"profile": True}
        )
        engine = mpispeed.initialize(model=made, config=asked)[0]
        assert made.activation_checkpoint_interval == interval
        assert made.activation_checkpoint_func is mpispeed.checkpointing.checkpoint
        train(engine, 1)
        engine.destroy()
        assert made.activation_checkpoint_interval == 0
        assert made.activation_checkpoint_func is given


@pytest.mark.parametrize("kind", ["number", "ragged", "dict"])
def test_what_has_no_mean_is_told_to_all_stages(kind, world):
    def loss(outputs, labels):
        if kind == "number":
            return float(square(outputs, labels))
        return outputs[:1] if kind == "ragged" and next(calls) else {"loss": outputs} if kind == "dict" else outputs

    calls = iter(range(100))
    made = PipelineModule([linear() for _ in range(4)], num_stages=2, loss_fn=loss)
    engine = mpispeed.initialize(model=made, config=config())[0]
    if kind == "number":
        assert float(engine.eval_batch(iter(pairs(0)))) > 0
    else:
        with pytest.raises(
            UsageError, match=r"cannot take the mean of what 4 micro-batches gave: .*reduce_output=None"
        ):
            engine.eval_batch(iter(pairs(0)))
    engine.destroy()


def test_a_sliced_model_outlives_its_engine(world):
    torch.manual_seed(0)
    model, x = nn.Sequential(Residual(WIDTH, 15), Residual(WIDTH, 15)), pairs(0)[0][0]
    expected = model(x).detach()
    sliced = {"autotp_size": 2, "injection_policy_tuple": {"up": "column", "down": "row"}}
    for _ in range(2):  # slices of 15 differ in size
        engine = mpispeed.initialize(model=model, config=config(tensor_parallel=sliced))[0]
        torch.testing.assert_close(engine(x).detach(), expected)
        engine.destroy()
        torch.testing.assert_close(model(x).detach(), expected)
    with pytest.raises(ConfigError, match=r"layer 0.up is cut over the 2 ranks \[0, 1\].*autotp_size to 2"):
        mpispeed.initialize(model=model, config=config())


def test_a_stage_that_trains_nothing_keeps_the_count_of_updates(mpi_tmp_path):
    """Bias correction goes on, also where rank 0, which writes the state, has no optimizer state itself."""

    def make():
        pipe = module([linear(), LayerSpec(nn.Tanh), linear(), linear()])
        for name, param in pipe.named_parameters():
            param.requires_grad_(not name.startswith("0"))
        return mpispeed.initialize(model=pipe, config=config())[0]

    engine = make()
    train(engine)
    engine.save_checkpoint(str(mpi_tmp_path))
    wanted = train(engine)
    engine.destroy()
    engine = make()
    engine.load_checkpoint(str(mpi_tmp_path))
    assert engine.counters.update_count == 3
    assert train(engine) == wanted
    engine.destroy()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["own", "by hand"])
def test_stages_of_layers_that_are_cut_already(kind, world, mpi_tmp_path):
    """Cut by the model's code and saved and loaded; cut by hand with our layers, on one stage only."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    mpu, slices = Mpu(2), Mesh(Topology({"pipe": 2, "data": 1, "model": 2}), world)["model"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            if kind == "own":
                self.up, self.down = Cut(WIDTH, 8, 0, mpu, marks=True), Cut(8, WIDTH, 1, mpu, marks=True)
            else:
                self.up, self.down = ColumnLinear(WIDTH, 8, slices), RowLinear(8, WIDTH, slices)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    def make():
        first = [LayerSpec(Block), LayerSpec(Block)] if kind == "own" else [linear(), LayerSpec(nn.Tanh)]
        pipe = module([*first, LayerSpec(Block), LayerSpec(Block)], num_stages=None, topology=topology, base_seed=3)
        return mpispeed.initialize(model=pipe, config=config())[0]

    engine = make()
    train(engine, 2)
    engine.save_checkpoint(str(mpi_tmp_path))
    wanted = train(engine, 2)
    engine.destroy()
    engine = make()
    engine.load_checkpoint(str(mpi_tmp_path))
    assert train(engine, 2) == wanted
    engine.destroy()
    mpu.free()
