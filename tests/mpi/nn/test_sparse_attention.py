"""Attention over blocks of a sequence that ranks share by heads gives what one process gives."""

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.nn.sequence import use
from mpispeed.nn.sparse import BigBirdSparsityConfig, FixedSparsityConfig, SparseSelfAttention
from tests.helpers import sequences as helpers
from tests.helpers.covering import on_ranks

pytestmark = pytest.mark.mpi(min_size=1)

PATTERNS = {
    "alike": lambda heads: FixedSparsityConfig(heads, 4),
    "each its own": lambda heads: BigBirdSparsityConfig(heads, 4, True, attention="unidirectional", seed=4),
}


def passed(module, tensors, **options):
    q, k, v, grad = (x.detach().clone().requires_grad_() for x in tensors)
    out = module(q, k, v, **options)
    out.backward(grad.detach())
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize(
    ("pattern", "heads", "documents", "causal"), on_ranks(list(PATTERNS), (5, 8, 2), ("one", "padded"), (True, False))
)
def test_outputs_and_gradients_equal_one_process(comm, pattern, heads, documents, causal):
    length = 36
    spans = helpers.spans_of(documents, length)
    tensors = helpers.inputs(length, heads, heads)
    running = helpers.running_of(comm, "ulysses", length, spans, causal=causal)
    padding = None
    if spans is not None:
        padding = torch.full((helpers.ROWS, length), -torch.inf)
        for row, ((start, stop),) in enumerate(spans):
            padding[row, start:stop] = 0
    module = SparseSelfAttention(PATTERNS[pattern](heads), max_seq_length=64)
    expected = passed(module, tensors, key_padding_mask=padding, is_causal=causal)
    with use(running):
        options = {"key_padding_mask": padding} if comm.size == 1 else {}
        own = [running.layout.cut(x, running.rank, 2) for x in tensors]
        found = passed(module, own, is_causal=causal, **options)
    for one, whole in zip(found, expected, strict=True):
        # fp32, sums of other heads side by side
        torch.testing.assert_close(one, running.layout.cut(whole, running.rank, 2), rtol=0, atol=1e-5)


@pytest.mark.ranks(2, 3)
def test_what_needs_more_than_heads_is_refused_before_anything_is_sent(comm):
    module = SparseSelfAttention(FixedSparsityConfig(4, 4), max_seq_length=64)
    tensors = helpers.inputs(32, 4, 4)
    ring = helpers.running_of(comm, "ring", 32)
    with use(ring), pytest.raises(NotImplementedError, match="ring_size to 1"):
        module(*(ring.layout.cut(x, ring.rank, 2) for x in tensors[:3]))
    for documents, options, sentence in (
        ("packed", {}, "several documents"),
        ("one", {"attn_mask": torch.ones(32, 32)}, "masks are given"),
    ):
        running = helpers.running_of(comm, "ulysses", 32, helpers.spans_of(documents, 32))
        with use(running), pytest.raises(NotImplementedError, match=sentence):
            module(*(running.layout.cut(x, running.rank, 2) for x in tensors[:3]), **options)
    odd = helpers.running_of(comm, "ulysses", 33)
    with use(odd), pytest.raises(ValueError, match="pad it to 36"):
        module(*(odd.layout.cut(x, odd.rank, 2) for x in helpers.inputs(33, 4, 4)[:3]))
    own_patterns = SparseSelfAttention(PATTERNS["each its own"](4), max_seq_length=64)
    running = helpers.running_of(comm, "ulysses", 32)
    with use(running), pytest.raises(UsageError, match="for 4 heads, and query has 8; give it num_heads=8"):
        own_patterns(*(running.layout.cut(x, running.rank, 2) for x in helpers.inputs(32, 8, 8)[:3]))
    with use(running), pytest.raises(UsageError, match="attention got 32 queries and 32 keys"):
        module(*tensors[:3])
