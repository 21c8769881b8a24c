"""Layers of experts over MPI: against one process, and with ranks that have different numbers of tokens."""

import copy

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from mpispeed.base.errors import UsageError
from mpispeed.checkpointing import checkpoint
from mpispeed.mesh.mesh import Mesh, Topology
from mpispeed.mesh.world import start
from mpispeed.moe import MoE
from mpispeed.nn.expert import Levels, RoutedExperts, Router, RouterOptions, SwiGLUExperts, split_by_node
from tests.helpers import experts as helpers
from tests.helpers.tensor import assert_near

pytestmark = pytest.mark.mpi(min_size=1)

COUNTS = {1: [7], 2: [5, 0], 3: [4, 0, 9], 4: [0, 3, 1, 6]}
BOUND = 1e-5  # of the largest element, fp32: sums of some dozens of products in another order


@pytest.fixture
def ranks(comm):
    """A duplicate, so that the trace and the levels are those of the test."""
    return comm.split(0, comm.ranks, ("experts",))


@pytest.mark.parametrize(
    ("experts", "kind", "k"),
    [(6, "modules", 1), (6, "swiglu", 2), (6, "modules", 3), (2, "modules", 2), (2, "swiglu", 1)],
)
def test_equal_to_a_loop_over_experts(comm, ranks, experts, kind, k):
    """With 2 experts some of the ranks have none."""
    whole, inputs = helpers.whole_layer(kind, experts, k), helpers.tokens_of(COUNTS[comm.size])
    expected, of_experts = helpers.reference(whole, inputs)
    layer, x = copy.deepcopy(whole), inputs[comm.rank].clone().requires_grad_()
    layer.set_expert_group(ranks)
    y, routing = layer(x)
    helpers.loss_of(y, routing).backward()
    y_ref, x_ref, others = expected[comm.rank]
    assert_near(y.detach(), y_ref, BOUND, "output")
    assert_near(x.grad, x_ref, BOUND, "input")
    for name, param in (row for row in layer.named_parameters() if row[1].numel()):
        is_expert = helpers.is_of_expert(name)
        wanted = helpers.own_part(name, of_experts, layer) if is_expert else others[name]
        assert_near(param.grad, wanted, BOUND, name)


@pytest.mark.ranks(4)
def test_two_levels_give_the_same_bits(comm, ranks):
    found = []
    for levels in (None, split_by_node(ranks, 2)):
        layer, x = helpers.whole_layer("swiglu", 6, 2), helpers.tokens_of(COUNTS[4])[comm.rank].requires_grad_()
        layer.set_expert_group(ranks, levels)
        y, routing = layer(x)
        helpers.loss_of(y, routing).backward()
        found.append([y, x.grad, *(param.grad for param in layer.parameters())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ranks_per_node", [0, 2])
def test_a_shared_expert_beside_the_exchange_gives_the_same_bits(comm, ranks_per_node, recomputes):
    """Over groups of a mesh, whose started verbs have a thread."""
    if ranks_per_node and comm.size != 4:
        ranks_per_node = 0
    world, axes = start(), {"far": comm.size // max(ranks_per_node, 1), "near": max(ranks_per_node, 1)}
    mesh, found, bytes_sent = Mesh(Topology(axes), world), [], []
    for is_beside in (False, True):
        layer = helpers.whole_layer("swiglu", 12, 2, shared=True)
        layer.shared_overlap = is_beside
        x = helpers.tokens_of(COUNTS[comm.size])[comm.rank].requires_grad_()
        layer.set_expert_group(mesh["far", "near"], Levels(mesh["near"], mesh["far"]) if ranks_per_node else None)
        mesh.comm_trace.reset()
        y, routing = checkpoint(layer, x) if recomputes else layer(x)
        helpers.loss_of(y, routing).backward()
        bytes_sent.append(mesh.comm_trace.total_bytes())
        found.append([y, x.grad, *(param.grad for param in layer.parameters())])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert bytes_sent[0] == bytes_sent[1]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [True, False])
def test_batches_and_lengths_that_differ_between_ranks(comm, k, drop_tokens):
    """Ranks that agree on no capacity do not wait for each other: DeepSpeed issues 6809 and 5794."""
    torch.manual_seed(0)
    layer = MoE(6, helpers.Block(), num_experts=4 * comm.size, ep_size=comm.size, k=k, drop_tokens=drop_tokens)
    layer.set_deepspeed_parallelism()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(4):
        batch, length = (2, 10, 1, 5)[(comm.rank + step) % 4], (3, 1, 7)[(comm.rank + 2 * step) % 3]
        output, loss, counts = layer(torch.randn(batch, length, 6, generator=generator))
        assert output.shape == (batch, length, 6)
        assert counts.sum() == batch * length * k
        (output.square().mean() + 0.01 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.isfinite().all() for param in layer.parameters())


@pytest.mark.parametrize("is_data_first", [False, True])
@pytest.mark.ranks(1, 2, 4)
def test_groups_of_deepspeeds_call(comm, is_data_first):
    ep_size = max(comm.size // 2, 1)
    layer = MoE(6, helpers.Block(), num_experts=4, ep_size=ep_size, drop_tokens=False)
    layer.set_deepspeed_parallelism(use_data_before_expert_parallel_=is_data_first)
    group, groups = layer.deepspeed_moe.comm, comm.size // ep_size
    first = comm.rank // ep_size * ep_size
    expected = range(comm.rank % groups, comm.size, groups) if is_data_first else range(first, first + ep_size)
    assert list(group.ranks) == list(expected)
    assert layer.deepspeed_moe.experts.held == range(group.rank * 4 // ep_size, (group.rank + 1) * 4 // ep_size)
    with pytest.raises(UsageError, match="has its group"):
        layer.set_deepspeed_parallelism()


def test_weights_that_are_equal_give_the_same_for_any_number_of_ranks(comm):
    """Experts are copies at first, so a layer over ranks equals one on a rank."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(comm.rank))
    found = []
    for ep_size in (1, comm.size):
        torch.manual_seed(0)
        layer = MoE(6, helpers.Block(), num_experts=2 * comm.size, ep_size=ep_size, k=2, drop_tokens=False)
        layer.set_deepspeed_parallelism()
        found.append(layer.eval()(x)[0])
    assert_close(*found)


def test_equal_to_a_block_of_transformers(comm, ranks):
    """Qwen3-MoE: fused experts have the same tensors in the same order."""
    shape = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3}
    block = Qwen3MoeSparseMoeBlock(transformers.Qwen3MoeConfig(**shape, norm_topk_prob=True))
    layer = RoutedExperts(Router(32, 8, RouterOptions(k=3)), SwiGLUExperts(32, 16, 8))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0, 0.5, generator=generator)
        layer.gate.wg.weight.copy_(block.gate.weight)
        layer.experts.load_state_dict(block.experts.state_dict())
    layer.set_expert_group(ranks)
    inputs = [torch.randn(2, 5 + rank, 32, generator=generator) for rank in range(comm.size)]
    x = inputs[comm.rank].clone().requires_grad_()
    y, _ = layer(x)
    y.sin().sum().backward()
    for rank, each in enumerate(inputs):
        other = each.clone().requires_grad_()
        expected = block(other)
        expected.sin().sum().backward()
        if rank == comm.rank:
            assert_near(y.detach(), expected.detach(), BOUND, "output")
            assert_near(x.grad, other.grad, BOUND, "input")
    held = layer.experts.held
    for name, param in layer.experts.named_parameters():
        assert_near(param.grad, block.experts.get_parameter(name).grad[held.start : held.stop], BOUND, name)
