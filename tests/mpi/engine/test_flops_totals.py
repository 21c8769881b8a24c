"""One step counted on all ranks and summed is what one process computes, whatever shares the work: exactly."""

import pytest
import torch

import mpispeed
from mpispeed.flops import ModuleCounter, flops_of_step, get_model_profile
from mpispeed.flops.tables import Totals
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from tests.helpers.covering import on_ranks
from tests.helpers.feature_models import SHAPE, Whole, gpt_layers, layers
from tests.helpers.own_cut import Mpu, OwnCut
from tests.helpers.tiny_models import VOCAB, tiny_model
from tests.zoo.models import batches as token_batches
from tests.zoo.training import ADAM, config, own_part, start

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 24
SLICES = {"tensor_parallel": {"autotp_size": 2, "injection_policy_tuple": gpt_layers.SLICES}}
SEQUENCE = {"tensor_parallel": {**SLICES["tensor_parallel"], "sequence_parallel": True}}
COUNTED = {"flops_profiler": {"enabled": True, "profile_step": 1, "detailed": False}, "steps_per_print": None}


def batch():
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randint(256, (BATCH, SHAPE.block), generator=generator) for _ in range(2))


def whole(**options):
    """What one process computes of the global batch."""
    return alone(Whole(**options), batch())


def alone(model, inputs):
    """What a model computes in one process."""
    counter = ModuleCounter(model)
    counter.start()
    model(*inputs).backward()
    counter.stop()
    total, params = counter.total(), sum(param.numel() for param in model.parameters())
    experts = sum(param.numel() for name, param in model.named_parameters() if "experts" in name)
    work = total.deepspeed_flops, total.deepspeed_macs, total.forward, total.backward, total.recompute
    assert all(work[:4]) and not counter.unknown
    return Totals(*work, params, experts)


def totals(engine, steps=2, *, is_direct=False):
    """Those of the profile of an engine after its steps."""
    for _ in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*own_part(engine, batch(), micro))
            loss.backward() if is_direct else engine.backward(loss)
            engine.step()
            with torch.no_grad():
                engine.eval()(*own_part(engine, batch()))
            engine.train()
    return closed(engine)


def closed(engine):
    profiler = engine.flops_profiler
    engine.destroy()
    assert not profiler.started
    return profiler.facts.totals


def is_written_once(capfd, comm):
    return capfd.readouterr().out.count("Profile Summary at step 2:") == (comm.rank == 0)


@pytest.mark.parametrize(("stage", "accumulation"), on_ranks([0, 1, 2, 3], [1, 2]))
def test_data_ranks(comm, capfd, stage, accumulation):
    engine = start(config(stage, BATCH, accumulation, **COUNTED, **ADAM), Whole())
    assert totals(engine) == whole()
    assert is_written_once(capfd, comm)


@pytest.mark.parametrize("stage", [0, 3])
def test_passes_that_scripts_start_and_recomputation(comm, capfd, stage):
    engine = start(config(stage, BATCH, 1, **COUNTED, **ADAM), Whole(recomputes=True))
    found = totals(engine, is_direct=True)
    assert found == whole(recomputes=True)
    assert 0 < found.recompute < found.forward
    assert is_written_once(capfd, comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("section", "stage"), [(SLICES, 0), (SLICES, 3), (SEQUENCE, 1)])
@pytest.mark.parametrize("recomputes", [False, True])
def test_slices(comm, capfd, section, stage, recomputes):
    engine = start(config(stage, BATCH, 1, **section, **COUNTED, **ADAM), Whole(recomputes=recomputes))
    assert totals(engine) == whole(recomputes=recomputes)
    assert is_written_once(capfd, comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(
    ("schedule", "slices", "interval", "stage"),
    [("1f1b", 1, 0, 0), ("1f1b", 2, 1, 1), ("interleaved", 1, 1, 0), ("zb-h1", 2, 0, 0)],
)
def test_stages(comm, capfd, schedule, slices, interval, stage):
    slices = min(slices, comm.size // 2)
    topology = PipeModelDataParallelTopology(2, slices, comm.size // 2 // slices)
    model = PipelineModule(
        layers(),
        topology=topology,
        loss_fn=gpt_layers.cross_entropy,
        activation_checkpoint_interval=interval,
        num_chunks=2 if schedule == "interleaved" else 1,
    )
    section = {"pipeline": {"schedule": schedule}, **(SLICES if slices > 1 else {})}
    engine = start(config(stage, BATCH, 2, **section, **COUNTED, **ADAM), model)
    for _ in range(2):
        engine.train_batch(iter([own_part(engine, batch(), micro) for micro in range(2)]))
    found, expected = closed(engine), whole()
    assert bool(found.recompute) == bool(interval)
    assert (found.flops, found.macs, found.forward, found.backward, found.params) == (
        expected.flops, expected.macs, expected.forward, expected.backward, expected.params
    )  # fmt: skip
    assert is_written_once(capfd, comm)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 3])
def test_slices_that_a_model_has_cut_itself(comm, stage):
    mpu, (tokens, *_) = Mpu(2), token_batches(1, BATCH)
    settings = config(stage, BATCH, 1, **COUNTED, **ADAM)
    engine = mpispeed.initialize(model=OwnCut(mpu), mpu=mpu, config=settings)[0]
    for _ in range(2):
        engine.backward(engine(*own_part(engine, tokens)))
        engine.step()
    assert closed(engine) == alone(OwnCut(), (tokens,))
    mpu.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("family", ["opt", "bert"])
def test_slices_of_models_of_transformers(comm, family):
    """Norms beside sliced layers, and sums of slices before a norm in the same module."""
    ids = torch.randint(3, VOCAB, (4, 10), generator=torch.Generator().manual_seed(1))
    model = tiny_model(family).train()
    with flops_of_step(model) as counts:
        model(input_ids=ids, labels=ids).loss.backward()
    expected = counts.forward, counts.backward
    flops, macs, params = get_model_profile(
        model, kwargs={"input_ids": ids, "labels": ids}, print_profile=False, as_string=False
    )
    settings = {"train_micro_batch_size_per_gpu": 4, "tensor_parallel": {"autotp_size": 2}, **COUNTED, **ADAM}
    engine = start(settings, tiny_model(family).train())
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    found = closed(engine)
    assert (found.forward, found.backward, found.flops, found.macs, found.params) == (*expected, flops, macs, params)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 2])
def test_experts_count_once(comm, capfd, stage):
    engine = start(config(stage, BATCH, 1, **COUNTED, **ADAM), Whole(ep_size=min(comm.size, 2)))
    found, expected = totals(engine), whole(ep_size=1)
    assert found == expected
    assert 0 < found.expert_params < found.params
    assert is_written_once(capfd, comm)
