"""Training on a device is training on the host, to the bit: every stage, dtype and tier."""

import pytest
import torch

import mpispeed
from tests.helpers.on_device import moved
from tests.helpers.training import TinyLM, batches, config, train_engine, weights, zero

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 36
SECTIONS = [zero(0), zero(1), zero(2), zero(3), zero(3, stage3_max_reuse_distance=0), {"stage": 3}]
CPU = {"device": "cpu"}


def precision(name):
    more = {"initial_scale_power": 8} if name == "fp16" else {}
    return {} if name == "fp32" else {name: {"enabled": True, **more}}


def run(section, accumulation=1, device=None, dtype="fp32", steps=5, **more):
    settings = config(0, BATCH, accumulation, reduction="ordered", **precision(dtype), **more)
    model = moved(TinyLM(), device)
    engine = mpispeed.initialize(model=model, config=settings | {"zero_optimization": section})[0]
    if device is not None:
        assert engine.device == device
        assert all(param.device == device for param in engine.module.parameters())
    losses = train_engine(engine, batches(steps, BATCH))
    found = losses, engine.get_global_grad_norm(), {k: v.cpu() for k, v in weights(engine).items()}
    engine.destroy()
    if device is not None:
        assert all(param.device == device for param in model.parameters())
    return found


def check_same(found, expected):
    assert found[:2] == expected[:2]
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_stages(device, on_host, section, accumulation, dtype):
    found = run(section, accumulation, device, dtype)
    on_host()
    check_same(found, run(section, accumulation, None, dtype))
