"""Experts beside every other axis, stage and place of states train as one process that loops over all experts.

`MPISPEED_MATRIX=full` (`make matrix`) trains every combination instead of every pair of values.
"""

import pytest
import torch

from tests.helpers.expert_cases import bits, cases, check

pytestmark = pytest.mark.mpi(min_size=1)
CASES = cases()


def on_their_ranks(found):
    return [pytest.param(case, id=str(case), marks=pytest.mark.ranks(case.ranks)) for case in found]


@pytest.fixture(autouse=True)
def nodes(comm, monkeypatch):
    """4 ranks are two nodes, which quantized sums tell apart."""
    monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", "2" if comm.size == 4 else "1")


@pytest.mark.parametrize("case", on_their_ranks(CASES))
def test_gradients_are_those_of_a_loop_over_experts(case, mpi_tmp_path):
    """No rank waits for one with other numbers of tokens, or none: DeepSpeed issues 6809 and 5794."""
    check(case, mpi_tmp_path)


@pytest.mark.parametrize("case", on_their_ranks(CASES[::7]))
def test_the_same_layout_gives_the_same_bits(case, mpi_tmp_path, monkeypatch):
    """Nodes of 4 ranks instead of 2 are for exchanges of rows in one level instead of two."""
    one = bits(case, mpi_tmp_path / "one")
    if case.way != "qgz":
        monkeypatch.setenv("MPISPEED_RANKS_PER_NODE", str(case.ranks))
    two = bits(case, mpi_tmp_path / "two")
    assert len(one) == len(two)
    assert all(map(torch.equal, one, two))
