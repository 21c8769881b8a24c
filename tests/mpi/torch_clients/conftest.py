"""Clients of torch.distributed that a module names in CLIENTS, run over our group and over gloo."""

import pytest

from tests.helpers.torch_groups import run_all


@pytest.fixture(scope="module")
def ours(world, request):
    return run_all(world, "mpi4py", request.module.CLIENTS)


@pytest.fixture(scope="module")
def theirs(world, request):
    return run_all(world, "gloo", request.module.CLIENTS)
