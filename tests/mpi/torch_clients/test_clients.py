"""DistributedDataParallel over our group, compared with gloo."""

import os

import pytest

from tests.helpers import torch_clients
from tests.helpers.torch_groups import check_bits, check_same, run_all

CLIENTS = torch_clients.DDP
RANKS = (1, 2, 3, 4) if os.environ.get("MPISPEED_MATRIX") == "full" else (2, 3)
pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(*RANKS)]


@pytest.mark.parametrize("name", CLIENTS)
def test_as_with_gloo(world, ours, theirs, name):
    # Sums of 16 bits are rounded once here, and by gloo after each rank.
    check_same(ours[name], theirs[name], world.size, tolerance=2e-3 if "fp16" in name else 1e-5)


@pytest.mark.ranks(3)
def test_twice_the_same_bits(world, ours):
    check_bits(ours, run_all(world, "mpi4py", CLIENTS))
