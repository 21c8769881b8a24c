"""Pipelines on a device train as on the host, to the bit; the engine moves the model there."""

import pytest

from tests.helpers.pipes import Case, Layout, train
from tests.zoo import same_bits
from tests.zoo.training import weights

pytestmark = pytest.mark.mpi(min_size=1)

ONE, TWO = Layout(1, 1, 1), Layout(2, 1, 1)
CASES = [
    Case(ONE, "1f1b", 0, "fp32"),
    Case(TWO, "1f1b", 2, "bf16"),
    Case(TWO, "1f1b", 1, "fp32", is_tied=True),
    Case(TWO, "zb-h1", 3, "fp32", is_per_micro=True),
    Case(TWO, "interleaved", 0, "bf16"),
    Case(Layout(1, 2, 1), "gpipe", 1, "bf16"),
    Case(Layout(2, 1, 2), "1f1b", 3, "bf16"),
    Case(Layout(2, 2, 1), "1f1b", 1, "fp32"),
]
STEPS = 2
PARTITIONED = {
    "partition_activations": True,
    "contiguous_memory_optimization": False,
    "cpu_checkpointing": True,
    "number_checkpoints": 4,
}


def run(case, device, **more):
    engine = case.engine(reduction="ordered", **more)
    if device is not None:
        assert all(param.device == device for param in engine.module.parameters())
    losses, norm = train(engine, range(STEPS)), engine.get_global_grad_norm()
    found = losses, norm, {name: value.cpu() for name, value in weights(engine).items()}
    engine.destroy()
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.ranks(case.layout.ranks)) for case in CASES], ids=str
)
def test_schedules(device, on_host, case):
    found = run(case, device)
    on_host()
    same_bits(found, run(case, None))


@pytest.mark.ranks(2)
def test_activation_checkpointing(device, on_host):
    more = {"activation_checkpointing": PARTITIONED, "pipeline": {"activation_checkpoint_interval": 1}}
    case = Case(TWO, "1f1b", 0, "bf16")
    found = run(case, device, **more)
    on_host()
    same_bits(found, run(case, None, **more))


@pytest.mark.ranks(2)
def test_evaluation_gives_every_stage_the_result(device, comm):
    from tests.helpers.pipes import feed

    engine = Case(TWO).engine()
    result = engine.eval_batch(feed(engine, 0))
    assert len({round(value, 6) for value in comm.gather_objects(float(result))}) == 1
    engine.destroy()
