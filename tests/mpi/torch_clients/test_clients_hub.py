"""accelerate and models of transformers over our group, compared with gloo."""

import os

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.helpers.hub_clients import hub
from tests.helpers.torch_groups import check_same

CLIENTS = hub()
RANKS = (2, 4) if os.environ.get("MPISPEED_MATRIX") == "full" else (2,)
pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(*RANKS)]


@pytest.mark.parametrize("name", CLIENTS)
def test_as_with_gloo(world, ours, theirs, name):
    check_same(ours[name], theirs[name], world.size)
