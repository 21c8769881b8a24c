"""Checkpoints of engines on a device: on the host, on a device, and at other cuts, training goes on alike."""

import pytest
import torch

import mpispeed
from tests.helpers.covering import on_ranks
from tests.helpers.on_device import moved
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged, weights, zero_section

pytestmark = pytest.mark.mpi(min_size=1)

BATCH = 24
CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}


def start(section, device, **more):
    settings = config(0, BATCH, 1, reduction="ordered", **(WARM | more)) | {"zero_optimization": section}
    return mpispeed.initialize(model=moved(TinyLM(), device), config=settings)[0]


SECTIONS = [
    (zero_section(1), zero_section(3)),
    (zero_section(3), zero_section(2)),
    (zero_section(3, offload_optimizer=CPU, offload_param=CPU), zero_section(3)),
]


@pytest.mark.parametrize(("sections", "more"), on_ranks(SECTIONS, [{}, BF16], ranks=(1, 2, 3)), ids=str)
def test_device_to_host_and_back(device, on_host, mpi_tmp_path, sections, more):
    saved, loaded = sections
    data = batches(6, BATCH)
    first = start(saved, device, **more)
    train_averaged(first, data[:3])
    first.save_checkpoint(str(mpi_tmp_path), tag="device")
    expected = train_averaged(first, data[3:])
    first.destroy()
    again = start(loaded, device, **more)
    again.load_checkpoint(str(mpi_tmp_path), tag="device")
    assert train_averaged(again, data[3:]) == expected
    again.destroy()
    on_host()
    second = start(loaded, None, **more)
    second.load_checkpoint(str(mpi_tmp_path), tag="device")
    second.save_checkpoint(str(mpi_tmp_path), tag="host")
    assert train_averaged(second, data[3:]) == expected
    second.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("more", [{}, {"checkpoint": {"async_save": True}}], ids=["now", "in the background"])
def test_host_to_device(device, on_host, monkeypatch, mpi_tmp_path, more):
    data = batches(6, BATCH)
    on_host()
    first = start(zero_section(2), None, **more)
    train_averaged(first, data[:3])
    first.save_checkpoint(str(mpi_tmp_path), tag="host")
    expected = train_averaged(first, data[3:])
    first.destroy()
    monkeypatch.setenv("MPISPEED_DEVICE", device.type)
    second = start(zero_section(3), device, **more)
    second.load_checkpoint(str(mpi_tmp_path), tag="host")
    second.save_checkpoint(str(mpi_tmp_path), tag="device")
    assert train_averaged(second, data[3:]) == expected
    second.load_checkpoint(str(mpi_tmp_path), tag="device")
    assert train_averaged(second, data[3:]) == expected
    second.destroy()


def test_random_numbers_of_the_device_go_on(device, mpi_tmp_path):
    engine = start(zero_section(1), device)
    torch.get_device_module(device).manual_seed(5 + engine.global_rank)
    engine.save_checkpoint(str(mpi_tmp_path), tag="a")
    expected = torch.rand(7, device=device)
    torch.rand(3, device=device)
    engine.load_checkpoint(str(mpi_tmp_path), tag="a")
    assert torch.equal(torch.rand(7, device=device).cpu(), expected.cpu())
    engine.destroy()


def test_weights_are_told_and_taken(device):
    """State dicts, gathered parameters and single masters."""
    engine = start(zero_section(3), device)
    state, weight, before = engine.module_state_dict(), engine.module.norm.weight, weights(engine)
    with mpispeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        weight.data.add_(1.0)
    assert torch.equal(weights(engine)["norm.weight"].cpu(), before["norm.weight"].cpu() + 1.0)
    engine.load_module_state_dict(state)
    found = mpispeed.zero.safe_get_full_fp32_param(weight)
    assert torch.equal(found.cpu(), before["norm.weight"].cpu())
    mpispeed.zero.safe_set_full_fp32_param(weight, found * 2)
    assert torch.equal(weights(engine)["norm.weight"].cpu(), before["norm.weight"].cpu() * 2)
    engine.destroy()
