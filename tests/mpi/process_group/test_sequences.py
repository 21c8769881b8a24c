"""Random sequences of verbs on two groups, some of them waited for later: the same tensors as over gloo.

All ranks draw the same sequences: examples are derived from the test alone, and all ranks share one verdict.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.covering import IS_FULL
from tests.helpers.torch_verbs import single

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.ranks(2, 3, 4)]
EXAMPLES = 200 if IS_FULL else 67  # on each number of ranks
COUNT, TENSORS = 12, 3  # a multiple of every size


class Run:
    """Some tensors, and verbs between them over one backend."""

    def __init__(self, both, backend):
        self.groups = {name: (getattr(groups, backend), groups) for name, groups in both.items()}
        rank = dist.get_rank()
        self.tensors = [(torch.arange(COUNT, dtype=torch.int64) * (i + 3) + rank) % 8 for i in range(TENSORS)]
        self.tensors[-1] = self.tensors[-1].float()
        self.pending = {}

    def settle(self, index):
        """Wait until the tensor has no verb under way."""
        if index in self.pending:
            work, finish = self.pending.pop(index)
            if work is not None:
                work.wait()
            finish()
            self.tensors[index].remainder_(8)  # sums stay exact

    def step(self, verb, name, index, root, is_async):
        """Start a verb on a tensor."""
        group, groups = self.groups[name]
        self.settle(index)
        if groups.me >= 0:
            self.pending[index] = getattr(self, verb)(group, groups, self.tensors[index], root, is_async)
        if not is_async:
            self.settle(index)

    def all_reduce(self, group, groups, x, root, is_async):
        op = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN)[root % 4]
        return dist.all_reduce(x, op, group, is_async), lambda: None

    def broadcast(self, group, groups, x, root, is_async):
        src = root % len(groups.ranks)
        return dist.broadcast(x, group=group, group_src=src, async_op=is_async), lambda: None

    def reduce(self, group, groups, x, root, is_async):
        # Gloo leaves sums of parts on ranks that are not the root.
        part, dst = x.clone(), root % len(groups.ranks)
        work = dist.reduce(part, group=group, group_dst=dst, async_op=is_async)
        return work, lambda: x.copy_(part) if groups.me == dst else None

    def all_gather(self, group, groups, x, root, is_async):
        size = len(groups.ranks)
        out = x.new_empty(size * COUNT)
        work = single["all_gather"](out, x.clone(), group, is_async)
        return work, lambda: x.copy_(out.view(COUNT, size)[:, root % size])

    def reduce_scatter(self, group, groups, x, root, is_async):
        out = x.new_empty(COUNT // len(groups.ranks))
        work = single["reduce_scatter"](out, x.clone(), group=group, async_op=is_async)
        return work, lambda: x[: len(out)].copy_(out)

    def all_to_all(self, group, groups, x, root, is_async):
        out = torch.empty_like(x)
        return dist.all_to_all_single(out, x.clone(), group=group, async_op=is_async), lambda: x.copy_(out)

    def gather(self, group, groups, x, root, is_async):
        size, dst = len(groups.ranks), root % len(groups.ranks)
        outs = [torch.empty_like(x) for _ in range(size)] if groups.me == dst else None
        work = dist.gather(x.clone(), outs, group=group, group_dst=dst, async_op=is_async)
        return work, lambda: x.copy_(sum(outs)) if outs else None

    def scatter(self, group, groups, x, root, is_async):
        size, src = len(groups.ranks), root % len(groups.ranks)
        out = torch.empty_like(x)
        parts = [x + i for i in range(size)] if groups.me == src else None
        return dist.scatter(out, parts, group=group, group_src=src, async_op=is_async), lambda: x.copy_(out)

    def ring(self, group, groups, x, root, is_async):
        size, out = len(groups.ranks), torch.empty_like(x)
        if size == 1:
            return None, lambda: None
        sent = dist.isend(x.clone(), group=group, group_dst=(groups.me + 1) % size, tag=root)
        got = dist.irecv(out, group=group, group_src=(groups.me - 1) % size, tag=root)
        return got, lambda: (sent.wait(), x.copy_(out))

    def end(self):
        """All tensors, once nothing is under way."""
        for index in range(TENSORS):
            self.settle(index)
        return self.tensors


VERBS = sorted(name for name in vars(Run) if not name.startswith("_") and name not in ("settle", "step", "end"))
steps = st.tuples(
    st.sampled_from(VERBS),
    st.sampled_from(("world", "sub-group")),
    st.integers(0, TENSORS - 1),
    st.integers(0, 7),
    st.booleans(),
)


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(sequence=st.lists(steps, min_size=1, max_size=10))
def test_random_sequences(both, world, sequence):
    ends = []
    for backend in ("ours", "gloo"):
        run = Run(both, backend)
        for step in sequence:
            run.step(*step)
        ends.append(run.end())
    problem = "" if all(map(torch.equal, *ends)) else f"rank {world.rank}: {ends[0]} instead of {ends[1]}"
    found = [text for text in world.comm.gather_objects(problem) if text]
    assert not found, found
