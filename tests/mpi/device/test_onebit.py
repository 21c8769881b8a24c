"""1-bit optimizers on a device: states, errors and parameters of the host to the bit, and over checkpoints."""

import pytest
import torch

from tests.helpers.on_device import moved
from tests.helpers.onebit_training import FREEZE, NAMES, Mlp, engine_of, run_step, samples, states_of

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
    losses = [run_step(engine, batch) for batch in data]
    if folder is not None and not loads:
        engine.save_checkpoint(str(folder), tag="a")
    found = losses, {key: value.cpu() for key, value in states_of(engine).items()}
    engine.destroy()
    return found


def check_same(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [key for key in expected[1] if not torch.equal(found[1][key], expected[1][key])] == []


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "stage", "zero"), CASES)
def test_training(device, on_host, name, dtype, stage, zero):
    found = train(name, device, dtype, stage, zero)
    on_host()
    check_same(found, train(name, None, dtype, stage, zero))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_go_to_the_host(device, on_host, mpi_tmp_path, name):
    train(name, device, "fp32", 0, {}, FREEZE + 3, mpi_tmp_path)
    found = train(name, device, "fp32", 0, {}, STEPS, mpi_tmp_path, "a")
    on_host()
    check_same(found, train(name, None, "fp32", 0, {}, STEPS, mpi_tmp_path, "a"))
