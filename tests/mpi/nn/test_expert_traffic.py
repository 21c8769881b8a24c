"""Bytes that layers of experts send: those of the rows whose experts live on other ranks, by the routing itself."""

import pytest
import torch

from mpispeed.mesh.collectives.group import CommTrace
from mpispeed.nn.expert import split_by_node
from tests.helpers import experts as helpers

pytestmark = pytest.mark.mpi(min_size=1)

EXPERTS = 12
TOKENS = {1: [7], 2: [5, 8], 3: [4, 0, 9], 4: [6, 3, 0, 8]}
ROW = helpers.HIDDEN * 4  # bytes, fp32


def traced(comm, layer, tokens, ranks_per_node=0):
    """Bytes of each message of this rank in forward and backward, and the rows that it has for each rank."""
    trace = CommTrace()
    group = comm.split(0, comm.ranks, ("experts",), comm_trace=trace)
    layer.set_expert_group(group, split_by_node(group, ranks_per_node) if ranks_per_node else None)
    routings, sent = [], []
    layer.gate.register_forward_hook(lambda gate, args, routing: routings.append(routing))
    trace.subscribe(lambda record: sent.append((record.verb, record.sent_bytes)))
    y, _ = layer(helpers.tokens_of(TOKENS[comm.size] if tokens is None else tokens)[comm.rank].requires_grad_())
    y.sum().backward()
    [routing] = routings
    chosen = routing.experts if routing.kept is None else routing.experts[routing.kept]
    target = chosen.reshape(-1) // (EXPERTS // comm.size)
    assert {verb for verb, _ in sent} <= {"all_to_all"}
    return [size for _, size in sent], torch.bincount(target, minlength=comm.size)


def table(comm, rows):
    """Rows from each rank to each."""
    every = torch.empty(comm.size, comm.size, dtype=torch.int64)
    comm.all_gather(every, rows)
    return every


@pytest.mark.parametrize(("k", "capacity"), [(1, None), (2, 0.75), (3, None)])
def test_rows_to_other_ranks_and_counts_are_all_that_is_sent(comm, k, capacity):
    layer = helpers.whole_layer("swiglu", EXPERTS, k, capacity_factor=capacity, min_capacity=1)
    sent, rows = traced(comm, layer, None)
    if comm.size == 1:
        assert not sent
        return
    every = table(comm, rows)
    away = int(rows.sum() - rows[comm.rank])
    arrived = int(every[:, comm.rank].sum() - rows[comm.rank])
    counts = (comm.size - 1) * (EXPERTS // comm.size + 1) * 8
    assert sent == [counts, away * ROW, arrived * ROW, away * ROW, arrived * ROW]  # there, back; gradients the same way
    if capacity is None:
        assert int(every.sum()) == sum(TOKENS[comm.size]) * k
    else:
        assert int(every.sum()) < sum(TOKENS[comm.size]) * k
    total = torch.tensor([sum(sent[1::2]), sum(sent[2::2])])
    comm.all_reduce(total)
    assert total[0] == total[1]  # rows sent, rows received


@pytest.mark.parametrize("k", [1, 2])
def test_forced_balance_sends_what_the_formula_says(comm, k):
    tokens = 2 * EXPERTS
    layer = helpers.whole_layer("swiglu", EXPERTS, k, force_balance=True)
    sent, _ = traced(comm, layer, [tokens] * comm.size)
    direction = 2 * tokens * k * ROW * (comm.size - 1) // comm.size
    counts = (comm.size - 1) * (EXPERTS // comm.size + 1) * 8
    assert sum(sent) == 2 * direction + counts


@pytest.mark.ranks(4)
def test_with_two_levels_rows_cross_nodes_once(comm):
    layer = helpers.whole_layer("swiglu", EXPERTS, 2)
    sent, rows = traced(comm, layer, None, ranks_per_node=2)
    every, node, place = table(comm, rows), comm.rank // 2, comm.rank % 2
    inside = every[comm.rank, 1 - place :: 2].sum()
    through = every[2 * node : 2 * node + 2, 2 * (1 - node) + place].sum()
    assert sent[2:4] == [int(inside) * ROW, int(through) * ROW]
