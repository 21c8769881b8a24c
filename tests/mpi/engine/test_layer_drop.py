"""Progressive layer drop under an engine: the losses of plain torch at every stage, with layers that are not run."""

import logging

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import mpispeed
from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError
from mpispeed.nn.layer_drop import convert_to_layer_drop
from mpispeed.pipe import LayerSpec, PipelineModule
from tests.helpers.layer_drop import BATCH, DROPS, SHAPE, batches, kept, model, settings, train_plain
from tests.helpers.pipes import gpt, gpt_layers
from tests.helpers.steady_gpt import SteadyGPT
from tests.helpers.tensor import assert_near
from tests.zoo import same_bits
from tests.zoo.training import ADAM, config, start, train, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = 6
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CASES = {
    "plain": (0, {}),
    "overlap": (1, {"overlap_comm": True}),
    "reduced": (2, {"overlap_comm": True}),
    "sharded": (3, {}),
    "overlapped": (3, {"overlap_comm": True}),
    "kept whole": (3, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
    "host": (3, OFFLOAD),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_torch(name):
    stage, zero = CASES[name]
    accumulation = 1 if name == "sharded" else 2
    given = settings(stage, accumulation, gradient_clipping=0.5)
    given["zero_optimization"] |= zero
    engine = start(given, model())
    losses = train_averaged(engine, batches(STEPS))
    engine.destroy()
    assert losses == pytest.approx(train_plain(batches(STEPS), accumulation, clip=0.5)[0], rel=1e-5)


RECOMPUTE = {
    "own": checkpointing.checkpoint,
    "torch": lambda *args: torch_checkpoint.checkpoint(*args, use_reentrant=False),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", RECOMPUTE)
@pytest.mark.parametrize("stage", [1, 3])
def test_recomputation_changes_no_bit(stage, name):
    """Also where all forward passes of a batch come before the first backward pass."""
    outcomes = []
    for recompute in (None, RECOMPUTE[name]):
        engine = start(settings(stage, 2, reduction="ordered"), model(recompute))
        for x, y in batches(STEPS):
            share = len(x) // engine.mpispeed.parts.mesh["data"].size
            own = slice(engine.mpispeed.parts.mesh.index("data") * share, None)
            losses = [engine(*part) for part in zip(x[own][:share].chunk(2), y[own][:share].chunk(2), strict=True)]
            for loss in losses:
                engine.backward(loss)
                engine.step()
        outcomes.append(weights(engine))
        engine.destroy()
    same_bits(*outcomes)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ahead", [0, 10**8])
def test_layers_that_are_left_out_are_not_gathered(ahead):
    """A unit is fetched, ahead of its use too, only if its layer runs."""
    given = settings(3)
    given["zero_optimization"] |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": ahead}
    engine = start(given, model())
    parts, fetched, runs = engine.mpispeed.parts, [], []
    tally, order = parts.params.prefetcher.tally, parts.params.prefetcher.order
    blocks = [parts.table.locate(block.norm1.weight).unit.index for block in engine.module.blocks]
    begin = parts.params.shards.start_gather

    def gather(channel, unit, full, reader):
        fetched.append(unit.index)
        return begin(channel, unit, full, reader)

    parts.params.shards.start_gather = gather
    for step, batch in enumerate(batches(12)):
        fetched.clear()
        train(engine, [batch])
        present = [index for index, probability in zip(blocks, kept(step, 0), strict=True) if probability]
        runs.append(len(present))
        assert {index for index in fetched if index in blocks} == set(present)
    assert min(runs) < SHAPE.layers and tally.unused == 0
    assert order.deviations == 0
    assert (tally.ahead > 0) == (ahead > 0)
    engine.destroy()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_sums_of_the_others_do_not_wait_for_layers_that_are_left_out(stage):
    given = settings(stage)
    given["zero_optimization"] |= {"overlap_comm": True, "reduce_bucket_size": 1}
    engine = start(given, model())
    parts, taken = engine.mpispeed.parts, []
    grads = parts.optimization.grads
    original = grads._launch

    def launch(unit):
        taken.append((unit.index, grads.is_open))
        original(unit)

    grads._launch = launch
    blocks = [{parts.table.find(param).unit.index for param in block.parameters()} for block in engine.module.blocks]
    for step, batch in enumerate(batches(STEPS)):
        taken.clear()
        train(engine, [batch])
        out = set().union(*(units for units, p in zip(blocks, kept(step, 0), strict=True) if not p))
        assert {unit for unit, is_early in taken if not is_early} == out
        assert sorted(unit for unit, _ in taken) == [unit.index for unit in parts.table.units]
    engine.destroy()


@pytest.mark.ranks(1)
def test_theta_is_the_formula_after_each_step_and_all_layers_run_in_evaluation():
    engine = start(settings(0), model())
    assert engine.pld_enabled() and engine.get_pld_theta() == 1.0
    for step, batch in enumerate(batches(4)):
        train(engine, [batch])
        expected = engine.progressive_layer_drop.theta_at(step)
        assert engine.get_pld_theta() == expected == engine.progressive_layer_drop.get_state()["pld_theta"]
    x, y = batches(1)[0]
    engine.eval()
    whole = SteadyGPT(SHAPE)
    whole.load_state_dict(weights(engine))
    with torch.no_grad():
        same_bits(engine(x, y), whole(x, y))
    engine.destroy()


class Accepts(nn.Module):
    """A model that leaves layers out by itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.given = nn.Linear(4, 1), []

    def forward(self, x, progressive_layer_drop=False, pld_theta=None):
        self.given.append((progressive_layer_drop, pld_theta))
        return self.inner(x).mean()


@pytest.mark.ranks(1, 2)
def test_a_model_that_asks_is_given_theta(caplog):
    """As DeepSpeed's own test; one that does not accept it fails, and evaluation gives nothing."""
    engine = start(config(0, BATCH, **ADAM, **DROPS), Accepts())
    x = torch.ones(2, 4)
    for _ in range(2):
        engine.backward(engine(x))
        engine.step()
    engine.eval()
    engine(x)
    assert engine.module.given == [(True, 1.0), (True, 1.0), (False, None)]
    engine.destroy()
    logger = logging.getLogger("mpispeed")
    logger.addHandler(caplog.handler)
    engine = start(config(0, BATCH, **ADAM, **DROPS), nn.Linear(4, 1))
    logger.removeHandler(caplog.handler)
    assert ("will end in a TypeError" in caplog.text) == (engine.mesh.rank == 0)
    with pytest.raises(TypeError, match="progressive_layer_drop"):
        engine(x)
    engine.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(tmp_path_factory, stage):
    folder = mpispeed.init_distributed().comm.share(str(tmp_path_factory.mktemp("saved")))
    data = batches(STEPS)
    engine = start(settings(stage, 2), model())
    train_averaged(engine, data[:3])
    engine.save_checkpoint(folder)
    expected = train_averaged(engine, data[3:])
    engine.destroy()
    engine = start(settings(stage, 2), model())
    engine.load_checkpoint(folder)
    same_bits(train_averaged(engine, data[3:]), expected)
    engine.destroy()


def pipeline(stages, **more):
    layers = [LayerSpec(gpt_layers.Bytes, SHAPE), *(LayerSpec(gpt_layers.PipeBlock, SHAPE),) * SHAPE.layers]
    layers += [LayerSpec(nn.LayerNorm, SHAPE.width), LayerSpec(gpt_layers.Head, SHAPE)]
    return PipelineModule(layers, num_stages=stages, loss_fn=gpt_layers.cross_entropy, seed_layers=True, **more)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("interval", [0, 1])
def test_stages_of_a_pipeline_leave_out_what_one_rank_leaves_out(interval):
    plain = SteadyGPT(SHAPE)
    size = mpispeed.init_distributed().size
    made = pipeline(2, activation_checkpoint_interval=interval)
    source = plain.state_dict()
    places = ["embedding", *(f"blocks.{index}" for index in range(SHAPE.layers)), "norm", "head"]
    with torch.no_grad():
        for name, param in made.named_parameters():
            place, _, rest = name.partition(".")
            param.copy_(source[f"{places[int(place)]}.{rest}"])
    convert_to_layer_drop(made, gpt.Block)
    engine = start(settings(1, 4, gradient_clipping=0.5), made)
    losses, share = [], BATCH // 4 // (size // 2)
    for x, y in batches(STEPS):
        first = engine.mpispeed.parts.mesh.index("data") * share
        micro = [(a[first : first + share], b[first : first + share])
                 for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]  # fmt: skip
        losses.append(float(engine.train_batch(iter(micro))))
    engine.destroy()
    assert losses == pytest.approx(train_plain(batches(STEPS), 4, clip=0.5)[0], rel=1e-5)


@pytest.mark.ranks(2)
def test_a_pipeline_without_such_layers_is_refused():
    with pytest.raises(ConfigError, match="the pipeline has no layer that can be left out; convert"):
        start(settings(0, 2), pipeline(2))


@pytest.mark.ranks(1, 4)
def test_deepspeeds_layers_need_no_call():
    sizes = {"hidden_size": 16, "heads": 2, "num_hidden_layers": 3, "initializer_range": 0.2}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            config = mpispeed.DeepSpeedTransformerConfig(**sizes)
            self.layers = nn.ModuleList(mpispeed.DeepSpeedTransformerLayer(config) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    x, outcomes = torch.randn(BATCH, 4, 16, generator=torch.Generator().manual_seed(1)), []
    for stage in (0, 3):
        engine = start(settings(stage), Net())
        outcomes.append(train_averaged(engine, [x] * STEPS))
        engine.destroy()
    assert_near(torch.tensor(outcomes[0]), torch.tensor(outcomes[1]))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_a_compiled_model_decides_anew_for_each_layer_and_pass():
    outcomes = []
    for is_compiled in (False, True):
        engine = start(settings(0), model())
        if is_compiled:
            engine.compile(backend="eager")
        outcomes.append(train(engine, batches(5)))
        engine.destroy()
    same_bits(*outcomes)
