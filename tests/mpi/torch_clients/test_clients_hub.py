"""accelerate and models of transformers over our group, compared with gloo."""

import os

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.helpers.hub_clients import hub
from tests.helpers.torch_groups import check_same, run_all

RANKS = (2, 4) if os.environ.get("MPISPEED_MATRIX") == "full" else (2,)
pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(*RANKS)]


@pytest.fixture(scope="module")
def ours(world):
    return run_all(world, "mpi4py", hub())


@pytest.fixture(scope="module")
def theirs(world):
    return run_all(world, "gloo", hub())


@pytest.mark.parametrize("name", hub())
def test_as_with_gloo(world, ours, theirs, name):
    check_same(ours[name], theirs[name], world.size)
