"""Layers of experts on a device: training is that on the host, but for sums that devices take in fp32."""

import copy

import pytest
import torch

import mpispeed
from tests.helpers.covering import on_ranks
from tests.helpers.expert_nets import HIDDEN, ExpertNet, expert_batches
from tests.helpers.on_device import moved
from tests.helpers.tensor import assert_near
from tests.zoo.training import WARM, config, train_averaged, zero_section

pytestmark = pytest.mark.mpi(min_size=1)

BATCH, CPU = 24, {"device": "cpu"}
SECTIONS = [
    zero_section(0),
    zero_section(2, offload_optimizer=CPU),
    zero_section(3),
    zero_section(3, offload_optimizer={"device": "cpu", "pin_memory": True}, offload_param=CPU),
]


def losses(comm, section, dtype, device=None):
    settings = config(0, BATCH, 1, dtype=dtype, reduction="ordered", **WARM) | {"zero_optimization": section}
    model = moved(ExpertNet(ep_size=comm.size), device)
    engine = mpispeed.initialize(model=model, config=settings)[0]
    found = train_averaged(engine, expert_batches(4, BATCH))
    engine.destroy()
    return found


@pytest.mark.parametrize(("section", "dtype"), on_ranks(SECTIONS, ["fp32", "bf16"], ranks=(1, 2)), ids=str)
def test_losses_are_those_of_the_host(comm, device, on_host, section, dtype):
    """Gradients of the routers' weights are sums in fp32 there, in fp64 on the host."""
    found = losses(comm, section, dtype, device)
    on_host()
    assert found == pytest.approx(losses(comm, section, dtype), rel={"fp32": 1e-6, "bf16": 2**-8}[dtype])


def test_what_is_not_finite_is_said_on_a_device(device, caplog):
    """In the pass itself, once its numbers of rows are there; a copy may be made before."""
    layer = ExpertNet().second
    x = torch.randn(9, HIDDEN)
    x[4, 0] = torch.nan
    expected, _ = layer(x)
    caplog.clear()
    there = moved(copy.deepcopy(layer), device)
    there.gate(x.to(device))
    copy.deepcopy(there.gate)
    y, _ = there(x.to(device))
    assert y.cpu().isnan().any(1).tolist() == expected.isnan().any(1).tolist() == [i == 4 for i in range(9)]
    assert_near(y.detach().cpu()[:4], expected.detach()[:4], 0.0, "output")
