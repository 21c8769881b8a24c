"""What the ranks of a sequence send, by their formulas, and what a ring rank holds."""

import pytest
import torch

from mpispeed.mesh.collectives.group import CommTrace
from mpispeed.nn.sequence.ulysses import Trade
from tests.helpers import sequences as helpers

pytestmark = pytest.mark.mpi(min_size=1)

HEADS = ((8, 2), (5, 5), (2, 1))


def sent(comm, kind, length, heads, dtype=torch.float32):
    """The cut, and bytes of each message in the order in which they were posted."""
    trace = CommTrace()
    running = helpers.running_of(comm.split(0, comm.ranks, ("sequence",), comm_trace=trace), kind, length)
    rows = []
    trace.subscribe(lambda record: rows.append((record.verb, record.sent_bytes)))
    helpers.shared(helpers.inputs(length, *heads, dtype), running)
    return running, rows


@pytest.mark.parametrize("heads", HEADS)
def test_ulysses_sends_each_token_once_to_whom_its_heads_belong(comm, heads):
    running, rows = sent(comm, "ulysses", 29, heads)
    counts = running.layout.ulysses_counts(0)
    trade = Trade(comm, counts, *heads)
    own = counts[comm.rank]

    def widths(rank):
        """Heads of queries, and of queries, keys and values together."""
        (a, b), (c, d) = trade.queries(rank), trade.keys(rank)
        return torch.tensor([b - a, b - a + 2 * (d - c)])

    mine = widths(comm.rank)
    others = sum(widths(rank) for rank in range(comm.size)) - mine
    token = helpers.ROWS * helpers.WIDTH * 4
    there, back = (token * own * others).tolist(), (token * (29 - own) * mine).tolist()
    expected = [] if comm.size == 1 else [there[1], back[0], there[0], back[1]]
    assert rows == [("all_to_all", size) for size in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_a_ring_sends_the_blocks_that_pass_and_their_gradients(comm, heads, dtype):
    running, rows = sent(comm, "ring", 29, heads, dtype)
    size, rank = comm.size, comm.rank
    counts = [running.layout.ring_count(place) for place in range(size)]
    token = 2 * helpers.ROWS * helpers.WIDTH * heads[1]
    passing = token * dtype.itemsize * sum(counts[(rank - turn) % size] for turn in range(size - 1))
    grads = token * 4 * (29 - counts[rank])
    assert {verb for verb, bytes_ in rows if bytes_} == ({"send"} if size > 1 else set())
    assert sum(bytes_ for _, bytes_ in rows) == (2 * passing + grads if size > 1 else 0)


@pytest.mark.ranks(2, 3, 4)
def test_a_ring_rank_holds_what_its_own_tokens_need(comm):
    peaks = {}
    for own in (64, 128):
        running = helpers.running_of(comm, "ring", own * comm.size)
        tensors = helpers.inputs(own * comm.size, 4, 2)
        q, k, v, grad = (running.layout.cut(x, comm.rank, 2).requires_grad_() for x in tensors)
        with helpers.Living() as living:
            out = helpers.attention(q, k, v, running=running)
            out.backward(grad.detach())
        peaks[own] = living.peak
    token = helpers.ROWS * helpers.WIDTH * 4  # bytes of a head
    # in heads of own tokens: output and sums 9, gradients of q 8, two blocks 8, sums for k and v (own, adding,
    # arriving, leaving) 16; less than two for one block's results of the kernel. Nothing of it is there for each place.
    assert peaks[128] <= 40 * 128 * token
    assert peaks[128] <= 2.01 * peaks[64]
