"""Random-LTD under an engine: the losses of plain torch at every stage, on slices and on stages; states and names."""

import logging

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from mpispeed import checkpointing
from mpispeed.base.errors import ConfigError
from mpispeed.nn.routing import convert_to_random_ltd, save_without_random_ltd
from mpispeed.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from tests.helpers.pipes import gpt, gpt_layers
from tests.helpers.token_dropping import (
    BATCH,
    LAYERS,
    SHAPE,
    End,
    PlacedBlock,
    Start,
    batches,
    dropping,
    settings,
    steady,
    train_plain,
)
from tests.zoo import same_bits
from tests.zoo.training import ADAM, config, start, train, train_averaged, weights

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = 6
OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
CASES = {
    "plain": (0, {}),
    "overlap": (1, {"overlap_comm": True}),
    "accumulation": (2, {"overlap_comm": True}),
    "sharded": (3, {}),
    "kept whole": (3, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}),
    "host": (3, OFFLOAD),
}
RECOMPUTE = {
    "none": None,
    "own": checkpointing.checkpoint,
    "torch": lambda *args: torch_checkpoint.checkpoint(*args, use_reentrant=False),
}


@pytest.fixture(scope="module")
def wanted():
    """Losses of plain torch."""
    return train_plain(steady(), gpt.Block, batches(STEPS), clip=0.5)


def converted(given, model=None):
    return convert_to_random_ltd(start(given, model or steady()), gpt.Block)


@pytest.mark.parametrize(("name", "accumulation"), list(zip(CASES, (1, 2, 2, 1, 2, 1), strict=True)))
def test_losses_are_those_of_plain_torch(name, accumulation, wanted):
    stage, zero = CASES[name]
    given = settings(stage, accumulation, gradient_clipping=0.5)
    given["zero_optimization"] |= zero
    engine = converted(given)
    losses = train_averaged(engine, batches(STEPS))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert losses[0] != pytest.approx(train_plain(steady(), gpt.Block, batches(1), layers=[1])[0], rel=1e-6)
    engine.destroy()


@pytest.mark.parametrize("name", [name for name in RECOMPUTE if name != "none"])
@pytest.mark.parametrize("stage", [1, 3])
def test_recomputation_changes_no_bit(stage, name):
    """Also where all forward passes of a batch come before the first backward pass."""
    outcomes = []
    for recompute in (None, RECOMPUTE[name]):
        engine = converted(settings(stage, 2, reduction="ordered"), steady(recompute))
        size, rank = engine.mpispeed.parts.mesh["data"].size, engine.mpispeed.parts.mesh.index("data")
        for x, y in batches(3):
            halves = zip(x.chunk(size)[rank].chunk(2), y.chunk(size)[rank].chunk(2), strict=True)
            losses = [engine(*half) for half in halves]
            for loss in losses:
                engine.backward(loss)
                engine.step()
        outcomes.append(weights(engine))
        engine.destroy()
    same_bits(*outcomes)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_few_bits_come_near(stage, dtype, wanted):
    low = {"enabled": True} if dtype == "bf16" else {"enabled": True, "initial_scale_power": 8}
    engine = converted(settings(stage, gradient_clipping=0.5, **{dtype: low}))
    assert train_averaged(engine, batches(STEPS)) == pytest.approx(wanted, rel=0.02)
    engine.destroy()


def test_evaluation_and_whole_lengths_have_the_bits_of_a_run_without():
    data = batches(2)
    whole = dropping()
    whole["random_ltd_schedule"] = {**whole["random_ltd_schedule"], "min_value": SHAPE.block}
    given = settings(2)
    given["data_efficiency"]["data_routing"]["random_ltd"] = whole
    engine, plain = converted(given), start(config(2, BATCH, 1, **ADAM), steady())
    train(engine, data), train(plain, data)
    same_bits(weights(engine), weights(plain))
    engine.destroy()
    engine = converted(settings(2), steady())
    engine.module.load_state_dict(plain.module.state_dict())
    engine.eval(), plain.eval()
    with torch.no_grad():
        same_bits(engine(*data[0]), plain(*data[0]))
    engine.destroy()
    plain.destroy()


def test_a_run_goes_on_where_it_was_saved(mpi_tmp_path, wanted):
    data = batches(STEPS)
    engine = converted(settings(3, gradient_clipping=0.5))
    losses = train_averaged(engine, data[:2])
    engine.save_checkpoint(str(mpi_tmp_path))
    tokens = engine.random_ltd_scheduler.state_dict()
    assert tokens["current_value"] == 6 and tokens["current_steps"] == 1
    assert tokens["consumed_layer_tokens"] == engine.random_ltd_scheduler.get_total_layer_tokens(2)
    engine.destroy()
    again = converted(settings(2, gradient_clipping=0.5))
    again.load_checkpoint(str(mpi_tmp_path))
    assert again.random_ltd_scheduler.state_dict() == tokens
    losses += train_averaged(again, data[2:])
    assert losses == pytest.approx(wanted, rel=1e-5)
    total = BATCH * sum(2 * kept + 2 * SHAPE.block for kept in (4, 6, 8, 10, 12, 12))
    assert again.random_ltd_scheduler.state["consumed_layer_tokens"] == total
    again.destroy()


@pytest.mark.parametrize(("least", "most", "length"), [(4, 8, 5), (8, 12, 9), (2, 12, 4)])
def test_a_run_goes_on_with_the_schedule_of_its_config(mpi_tmp_path, least, most, length):
    engine = converted(settings(1))
    train_averaged(engine, batches(2))
    engine.save_checkpoint(str(mpi_tmp_path))
    tokens = engine.random_ltd_scheduler.state["consumed_layer_tokens"]
    engine.destroy()
    given = settings(1)
    given["data_efficiency"]["data_routing"]["random_ltd"]["random_ltd_schedule"] |= {
        "min_value": least, "max_value": most
    }  # fmt: skip
    again = converted(given)
    again.load_checkpoint(str(mpi_tmp_path))
    assert again.random_ltd_scheduler.get_current_seq() == length
    assert again.random_ltd_scheduler.state["consumed_layer_tokens"] == tokens
    again.destroy()


def test_checkpoints_with_and_without_dropped_tokens_load_each_other(mpi_tmp_path):
    plain = start(config(2, BATCH, 1, **ADAM), steady())
    plain.save_checkpoint(str(mpi_tmp_path / "plain"))
    engine = converted(settings(3))
    assert engine.load_checkpoint(str(mpi_tmp_path / "plain"))[0] is not None
    train(engine, batches(1))
    engine.save_checkpoint(str(mpi_tmp_path / "dropping"))
    assert plain.load_checkpoint(str(mpi_tmp_path / "dropping"))[0] is not None
    same_bits(weights(plain), weights(engine))
    assert list(save_without_random_ltd(plain)) == list(plain.module.state_dict())
    plain.destroy()
    engine.destroy()


def test_converted_before_initialize(wanted):
    model = convert_to_random_ltd(steady(), gpt.Block)
    engine = start(settings(3, gradient_clipping=0.5), model)
    assert engine.random_ltd_enabled() and engine.random_ltd_config()["random_ltd_layer_id"] == LAYERS
    assert train_averaged(engine, batches(2)) == pytest.approx(wanted[:2], rel=1e-5)
    engine.destroy()
    inner = steady()
    inner.load_state_dict(weights(model))
    x, y = batches(1)[0]
    same_bits(model.train()(x, y).detach(), inner(x, y).detach())  # drops nothing without its engine


def test_what_does_not_fit_is_refused_on_every_rank():
    plain = start(config(0, BATCH, 1, **ADAM), steady())
    assert not plain.random_ltd_enabled()
    with pytest.raises(ConfigError, match="random-LTD is off in this engine"):
        convert_to_random_ltd(plain, gpt.Block)
    plain.destroy()
    engine = start(settings(0), steady())
    with pytest.raises(ValueError, match=r"random_ltd_layer_id has 1, 2, and no converted layer has such a number"):
        convert_to_random_ltd(engine, nn.Bilinear)
    engine.destroy()
    given = settings(0)
    given["data_efficiency"]["data_routing"]["random_ltd"]["model_mask_name"] = "mask"
    with pytest.raises(ConfigError, match=r"'mask', and layer 'blocks.1' takes x, rotation"):
        converted(given)


def test_an_engine_without_converted_layers_says_so(caplog):
    engine = start(settings(0), steady())
    with caplog.at_level(logging.WARNING):
        train(engine, batches(2))
    told = [record.message for record in caplog.records if "convert_to_random_ltd" in record.message]
    assert len(told) == (engine.mpispeed.parts.mesh.rank == 0)
    engine.destroy()


def test_lengths_and_layer_tokens_are_in_monitors(mpi_tmp_path):
    section = {"enabled": True, "output_path": str(mpi_tmp_path), "job_name": "ltd"}
    engine = converted(settings(0, csv_monitor=section))
    train(engine, batches(3))
    engine.destroy()
    rows = [
        (mpi_tmp_path / "ltd" / f"Train_Samples_{name}.csv").read_text().split()[1:]
        for name in ("random_ltd_reserved_length", "consumed_layer_tokens")
    ]
    assert [float(row.split(",")[1]) for row in rows[0]] == [4, 6, 8]
    assert [float(row.split(",")[1]) for row in rows[1]] == [BATCH * n for n in (32, 68, 108)]


# -- pipelines ---------------------------------------------------------------------------------------------------------

LAYOUTS = {1: [(1, 1, 1)], 2: [(2, 1, 1), (1, 2, 1)], 3: [(3, 1, 1)], 4: [(2, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1)]}


def specs():
    return [LayerSpec(Start), *(LayerSpec(PlacedBlock, SHAPE) for _ in range(SHAPE.layers)), LayerSpec(End)]


def built():
    """The layers in plain torch, with the weights that a pipeline gives them."""
    made = []
    for number, spec in enumerate(specs()):
        torch.manual_seed(1234 + number)
        made.append(spec.build())
    return nn.Sequential(*made)


@pytest.fixture(scope="module")
def wanted_of_pipes():
    return train_plain(built(), PlacedBlock, batches(3), layers=[2, 3])


def pipeline(layout, schedule="1f1b", *, recomputes=False, stage=0, before=False):
    pipe, model, data = layout
    given = settings(stage, 4, pipeline={"schedule": schedule})
    given["data_efficiency"]["data_routing"]["random_ltd"] |= {"random_ltd_layer_id": [2, 3], "token_inputs": []}
    if model > 1:
        given["tensor_parallel"] = {"autotp_size": model, "injection_policy_tuple": gpt_layers.SLICES}
    module = PipelineModule(
        specs(),
        topology=PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data),
        loss_fn=gpt_layers.cross_entropy,
        seed_layers=True,
        base_seed=1234,
        num_chunks=2 if schedule == "interleaved" else 1,
        partition_method="uniform",
        activation_checkpoint_interval=int(recomputes),
    )
    if before:
        convert_to_random_ltd(module, PlacedBlock)
    engine = start(given, module)
    return engine if before else convert_to_random_ltd(engine, PlacedBlock)


def run_pipeline(engine, steps=3):
    mesh = engine.mpispeed.parts.mesh
    size, rank = mesh["data"].size, mesh.index("data")
    losses = []
    for x, y in batches(steps):
        micros = [(x.chunk(4)[m].chunk(size)[rank], y.chunk(4)[m].chunk(size)[rank]) for m in range(4)]
        losses.append(float(engine.train_batch(iter(micros))))
    return losses


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1", "recomputed", "sharded", "converted before"])
def test_a_pipeline_drops_the_same_tokens(kind, comm, wanted_of_pipes):
    """Positions travel beside hidden states; kept tokens keep theirs."""
    schedule = kind if kind in ("interleaved", "zb-h1") else "1f1b"
    for layout in LAYOUTS[comm.size] if kind in ("1f1b", "converted before") else LAYOUTS[comm.size][:1]:
        if schedule == "interleaved" and layout[0] != 2:
            continue
        more = {"recomputes": kind == "recomputed", "before": kind == "converted before"}
        engine = pipeline(layout, schedule, stage=3 if kind == "sharded" else 0, **more)
        assert run_pipeline(engine) == pytest.approx(wanted_of_pipes, rel=1e-5)
        assert engine.random_ltd_scheduler.get_current_seq() == 8
        engine.destroy()
