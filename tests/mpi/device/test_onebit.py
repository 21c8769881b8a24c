"""1-bit optimizers on a device: states, errors and parameters of the host to the bit, and over checkpoints."""

import contextlib

import pytest

from tests.helpers.covering import on_ranks
from tests.helpers.divisors import TensorDivisors
from tests.helpers.on_device import moved
from tests.helpers.onebit_training import FREEZE, NAMES, engine_of, run_step, samples, states_of
from tests.zoo import same_bits
from tests.zoo.models import Mlp

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = FREEZE + 6
CASES = [
    ("fp32", 0, {}),
    ("bf16", 1, {}),
    ("fp32", 1, {"overlap_comm": True}),
]


def train(name, device, dtype, stage, zero, steps=STEPS, folder=None, loads=""):
    more = {"bf16": {"enabled": dtype == "bf16"}, "zero_optimization": {"stage": stage, **zero}, "reduction": "ordered"}
    engine = engine_of(name, stage, 1, moved(Mlp(), device), **more)
    if device is not None:
        assert all(param.device == device for param in engine.module.parameters())
    if loads:
        engine.load_checkpoint(str(folder), tag=loads)
    data = samples(STEPS)[engine.global_steps :][: steps - engine.global_steps]
    with contextlib.nullcontext() if device is None else TensorDivisors():
        losses = [run_step(engine, batch) for batch in data]
    if folder is not None and not loads:
        engine.save_checkpoint(str(folder), tag="a")
    found = losses, {key: value.cpu() for key, value in states_of(engine).items()}
    engine.destroy()
    return found


@pytest.mark.parametrize(("name", "case"), on_ranks(NAMES, CASES, ranks=(1, 2, 3)), ids=str)
def test_training(device, on_host, name, case):
    dtype, stage, zero = case
    found = train(name, device, dtype, stage, zero)
    on_host()
    same_bits(found, train(name, None, dtype, stage, zero))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_go_to_the_host(device, on_host, mpi_tmp_path, name):
    train(name, device, "fp32", 0, {}, FREEZE + 3, mpi_tmp_path)
    found = train(name, device, "fp32", 0, {}, STEPS, mpi_tmp_path, "a")
    on_host()
    same_bits(found, train(name, None, "fp32", 0, {}, STEPS, mpi_tmp_path, "a"))
