"""Attention of a sequence that ranks share gives what one process gives: outputs, gradients, in few messages."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence import attention, use
from mpispeed.nn.sequence.running import mark
from mpispeed.nn.sequence.ulysses import Trade
from tests.helpers import sequences as helpers
from tests.helpers.covering import on_ranks

pytestmark = pytest.mark.mpi(min_size=1)

CLOSE = {"rtol": 0, "atol": 1e-5}
"""fp32 and other orders of sums, against fp64; values are about 1."""

HEADS = ((8, 8), (8, 2), (5, 1), (6, 3), (3, 3), (2, 1))


def check(found, expected, running, bound=CLOSE):
    for one, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), running.layout.cut(whole, running.rank, 2), **bound)


@pytest.mark.parametrize(
    ("kind", "heads", "length", "documents", "causal"),
    on_ranks(helpers.KINDS, HEADS, (37, 64, 3), helpers.DOCUMENTS, (True, False)),
)
def test_outputs_and_gradients_equal_dense_attention(comm, kind, heads, length, documents, causal):
    spans = helpers.spans_of(documents, length)
    tensors = helpers.inputs(length, *heads)
    running = helpers.running_of(comm, kind, length, spans, causal=causal)
    check(helpers.shared(tensors, running), helpers.dense(tensors, causal, spans), running)


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.ranks(3, 4)
def test_sixteen_bits_round_once(comm, kind):
    tensors = helpers.inputs(41, 8, 2, torch.bfloat16)
    running = helpers.running_of(comm, kind, 41)
    expected = helpers.dense(tensors, True, None)
    found = helpers.shared(tensors, running, scale=None)
    assert all(x.dtype == torch.bfloat16 for x in found)
    check(found, expected, running, {"rtol": 0.05, "atol": 0.05})  # weights and sums of the kernel have 8 bits


@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.ranks(1, 2)
def test_autocast_gives_the_tensors_one_dtype(comm, kind):
    q, k, v, _ = helpers.inputs(20, 4, 2)
    running = helpers.running_of(comm, kind, 20)
    q, k, v = (running.layout.cut(x, running.rank, 2) for x in (q, k, v))
    expected = attention(*(x.bfloat16() for x in (q, k, v)), running=running)
    with torch.autocast("cpu", torch.bfloat16):  # rotations of positions leave fp32, projections do not
        found = attention(q, k, v.bfloat16(), running=running)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", helpers.KINDS)
@pytest.mark.ranks(2, 4)
def test_recomputed_passes_keep_their_cuts(comm, kind, use_reentrant):
    cases = []
    for length in (21, 34):
        tensors = helpers.inputs(length, 4, 2)
        running = helpers.running_of(comm, kind, length)
        q, k, v, grad = (running.layout.cut(x, running.rank, 2).requires_grad_() for x in tensors)
        with use(running):
            out = checkpoint(attention, q, k, v, use_reentrant=use_reentrant)
            mark(out)
        cases.append((tensors, running, (q, k, v), grad, out))
    for tensors, running, leaves, grad, out in cases:  # both wait: the marks tell them apart
        out.backward(grad.detach())
        check([out.detach(), *(x.grad for x in leaves)], helpers.dense(tensors, True, None), running)


@pytest.mark.parametrize("documents", helpers.DOCUMENTS)
@pytest.mark.ranks(1, 3)
def test_dropout_of_each_rank_is_that_of_its_heads(comm, documents):
    length, spans = 20, helpers.spans_of(documents, 20)
    tensors = helpers.inputs(length, 6, 6)
    running = helpers.running_of(comm, "ulysses", length, spans, causal=False)
    torch.manual_seed(comm.rank)
    out, *_ = helpers.shared(tensors, running, dropout=0.3)
    expected = []
    for rank in range(comm.size):
        start, stop = Trade(comm, (), 6, 6).queries(rank)
        torch.manual_seed(rank)
        q, k, v = (x[:, start:stop] for x in tensors[:3])
        whole = torch.zeros(q.shape)
        rows = [slice(None)] if spans is None else [slice(row, row + 1) for row in range(2)]
        for row, own in zip(rows, spans or [((0, length),)], strict=True):
            for first, last in own:
                part = [x[row, :, first:last] for x in (q, k, v)]
                whole[row, :, first:last] = functional.scaled_dot_product_attention(*part, dropout_p=0.3)
        expected.append(whole)
    check([out], [torch.cat(expected, 1).double()], running)


@pytest.mark.parametrize(
    ("options", "length", "said"),
    [
        ({"dropout": 0.1}, 12, "dropout of 0.1 in a ring of 3 ranks"),
        ({}, 13, r"attention got 4 queries and 4 keys, but rank \d of the sequence axis has \d of the 13 tokens"),
    ],
)
@pytest.mark.ranks(3)
def test_refusals(comm, options, length, said):
    running = helpers.running_of(comm, "ring", length)
    if length == 13 and running.layout.count(comm.rank) == 4:
        return
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(UsageError, match=said):
        attention(q, q, q, running=running, **options)


@pytest.mark.ranks(1, 3)
def test_rows_of_padding_alone_with_dropout_end_backward(comm):
    """Of 3 ranks one has no head: it must not wait in backward for ranks that have left it out."""
    running = helpers.running_of(comm, "ulysses", 7, ((), ()))
    tensors = helpers.inputs(7, 2, 2)
    found = helpers.shared(tensors, running, dropout=0.5)
    assert not any(x.any() for x in found)
