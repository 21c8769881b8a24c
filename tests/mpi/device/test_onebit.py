"""1-bit optimizers on a device: states, errors and parameters of the host to the bit, and over checkpoints."""

import contextlib

import pytest

from tests.helpers.covering import on_ranks
from tests.helpers.divisors import TensorDivisors
from tests.helpers.on_device import moved
from tests.helpers.onebit_training import FREEZE, NAMES, engine_of, run_step, samples, states_of
from tests.zoo import same_bits
from tests.zoo.models import Mlp
from tests.zoo.training import weights

pytestmark = pytest.mark.mpi(min_size=1)

STEPS = FREEZE + 6
CPU = {"device": "cpu"}
CASES = [
    ("fp32", 0, {}),
    ("bf16", 1, {}),
    ("fp32", 1, {"overlap_comm": True}),
    ("fp32", 1, {"offload_optimizer": CPU}),
    ("bf16", 1, {"offload_optimizer": CPU | {"pin_memory": True}, "overlap_comm": True}),
]


def train(name, device, dtype, stage, zero, steps=STEPS, folder=None, loads=""):
    more = {"bf16": {"enabled": dtype == "bf16"}, "zero_optimization": {"stage": stage, **zero}, "reduction": "ordered"}
    engine = engine_of(name, stage, 1, moved(Mlp(), device), **more)
    if device is not None:
        assert all(param.device == device for param in engine.module.parameters())
    if loads:
        engine.load_checkpoint(str(folder), tag=loads)
    parts, is_offloaded = engine.mpispeed.parts, "offload_optimizer" in zero
    home = "cpu" if device is None or is_offloaded else device.type
    for unit in parts.table.units:
        held = parts.params.shards.master(unit), *parts.optimization.states.of(unit).values()
        assert {tensor.device.type for tensor in held} == {home}
    data = samples(STEPS)[engine.global_steps :][: steps - engine.global_steps]
    with contextlib.nullcontext() if device is None else TensorDivisors():
        losses = [run_step(engine, batch) for batch in data]
    if folder is not None and not loads:
        engine.save_checkpoint(str(folder), tag="a")
    errors = parts.optimization.exchange.coder.errors.values()
    assert {x.device.type for pair in errors for x in (pair.worker, pair.server)} == {home}
    if is_offloaded and device is not None:
        assert not parts.optimization.exchange.units.is_beside
    engine.eval()  # local parameters of 0/1 Adam make room for the common ones, and come back
    common = {key: value.cpu() for key, value in weights(engine).items()}
    engine.train()
    if device is not None:
        assert all(param.device == device for param in engine.module.parameters())
    own = [param.detach().cpu().clone() for param in engine.module.parameters()]
    found = losses, common, own, {key: value.cpu() for key, value in states_of(engine).items()}
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
def test_states_in_files_are_those_of_the_host(device, on_host, mpi_tmp_path, name):
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(mpi_tmp_path)}}
    found = train(name, device, "bf16", 1, zero)
    on_host()
    same_bits(found, train(name, None, "bf16", 1, {}))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", NAMES)
def test_means_inside_of_nodes_go_to_the_host_too(device, on_host, monkeypatch, name):
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2")
    found = train(name, device, "fp32", 1, {"offload_optimizer": CPU})
    on_host()
    same_bits(found, train(name, None, "fp32", 1, {}))


@pytest.mark.parametrize(("name", "zero"), on_ranks(NAMES, [{}, {"offload_optimizer": CPU}], ranks=(1, 2)), ids=str)
def test_checkpoints_go_to_the_host(device, on_host, mpi_tmp_path, name, zero):
    stage = 1 if zero else 0
    train(name, device, "fp32", stage, zero, FREEZE + 3, mpi_tmp_path)
    found = train(name, device, "fp32", stage, zero, STEPS, mpi_tmp_path, "a")
    on_host()
    same_bits(found, train(name, None, "fp32", stage, zero, STEPS, mpi_tmp_path, "a"))
