"""States that rest in codes on a device, and in host memory and files beside it, have the bits of the host."""

import pytest

import mpispeed
from tests.helpers.covering import in_turn
from tests.helpers.on_device import moved
from tests.zoo import same_bits
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights, zero_section

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 12
INT8 = {"optimizer_states": "int8"}
KAHAN = {"master_dtype": "bf16", "master_rounding": "kahan"}
RANDOM = {"master_dtype": "bf16", "master_rounding": "stochastic"}
CPU, NVME = {"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": {"device": "nvme"}}
CASES = [
    (1, INT8, {}),
    (3, KAHAN | INT8, {}),
    (2, RANDOM | {"optimizer_states": "bf16"}, CPU),
    (3, KAHAN | INT8, CPU | {"offload_param": {"device": "cpu"}}),
    (2, KAHAN | INT8, NVME),
    (0, RANDOM | INT8, {}),
    (3, KAHAN | INT8, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
]


def on_cpu(tensors):
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def run(stage, types, more, device=None):
    section = zero_section(stage, **more)
    settings = config(0, BATCH, 1, dtype="bf16", reduction="ordered", data_types=types, **WARM)
    model = moved(TinyLM(), device)
    engine = mpispeed.initialize(model=model, config=settings | {"zero_optimization": section})[0]
    losses = train_averaged(engine, batches(3, BATCH))
    parts = engine.mpispeed.parts
    states = [
        {name: value.cpu() for name, value in parts.optimization.states.of(unit).items()} for unit in parts.table.units
    ]
    masters = [parts.params.shards.master(unit).cpu().clone() for unit in parts.table.units]
    found = losses, {name: value.cpu() for name, value in weights(engine).items()}, states, masters
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "types", "more"), in_turn(CASES, ranks=(1, 2)), ids=str)
def test_a_device_has_the_bits_of_the_host(device, on_host, mpi_tmp_path, stage, types, more):
    if more is NVME:
        more = {"offload_optimizer": NVME["offload_optimizer"] | {"nvme_path": str(mpi_tmp_path)}}
    found = run(stage, types, more, device)
    on_host()
    same_bits(found, run(stage, types, more))
