"""Layers of experts over simulated ranks against one process: outputs, gradients, exchanges."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from mpispeed.base.errors import ConfigError, TopologyError, UsageError
from mpispeed.mesh import sim
from mpispeed.nn.expert import ExpertModules, RoutedExperts, Router, SwiGLUExperts, split_by_node
from tests.helpers import experts as helpers
from tests.helpers.tensor import assert_near

BOUND = 1e-5  # of the largest element, fp32: sums of some dozens of products in another order

COUNTS = {1: [7], 2: [5, 0], 3: [4, 0, 9], 4: [0, 3, 1, 6]}


def trained(layer, inputs, levels=0):
    """What each rank has after forward and backward: output, input gradient, other gradients, layer."""
    copies = [(copy.deepcopy(layer), x.clone().requires_grad_()) for x in inputs]

    def work(world):
        own, x = copies[world.rank]
        own.set_expert_group(world.comm, split_by_node(world.comm, levels) if levels else None)
        world.comm.comm_trace.reset()
        y, routing = own(x)
        helpers.loss_of(y, routing).backward()
        grads = {name: param.grad for name, param in own.named_parameters()}
        return y.detach(), x.grad, grads, own, world.comm.comm_trace.total_bytes("all_to_all")

    return sim.run(len(inputs), work)


def check(layer, inputs):
    expected, of_experts = helpers.reference(layer, inputs)
    for (y, x_grad, grads, own, _), (y_ref, x_ref, others) in zip(trained(layer, inputs), expected, strict=True):
        assert_near(y, y_ref, BOUND, "output")
        assert_near(x_grad, x_ref, BOUND, "input")
        for name, grad in grads.items():
            is_expert = helpers.is_of_expert(name)
            wanted = helpers.own_part(name, of_experts, own) if is_expert else others[name]
            assert (grad is None) == (wanted.numel() == 0), name
            if grad is not None:
                assert_near(grad, wanted, BOUND, name)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", helpers.KINDS)
def test_equal_to_a_loop_over_experts(kind, size, k):
    check(helpers.whole_layer(kind, 4, k), helpers.tokens_of(COUNTS[size]))


@pytest.mark.parametrize("experts", [2, 3, 5, 7])
def test_experts_that_do_not_divide_over_the_ranks(experts):
    check(helpers.whole_layer("swiglu", experts, 2), helpers.tokens_of(COUNTS[4]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"score": "sigmoid", "groups": 4, "kept_groups": 2, "weight_scale": 2.5, "sequence_loss": True, "z_loss": True},
        {"capacity_factor": 0.5, "min_capacity": 1, "priority": "score"},
        {"capacity_factor": 0.5, "min_capacity": 1, "priority": "first"},
        {"force_balance": True, "renormalize": False},
    ],
)
def test_variants_of_the_router(options, size):
    check(helpers.whole_layer("mlp", 8, 2, shared=True, **options), helpers.tokens_of(COUNTS[size]))


def test_all_tokens_to_one_expert():
    layer = helpers.whole_layer("swiglu", 4, 1)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
    check(layer, helpers.tokens_of([3, 4, 5]))


def test_no_tokens_anywhere():
    for y, x_grad, grads, _, _ in trained(helpers.whole_layer("modules", 4, 2), helpers.tokens_of([0, 0])):
        assert y.shape == x_grad.shape == (0, helpers.HIDDEN)
        assert all(not grad.any() for grad in grads.values())


@pytest.mark.parametrize("kind", ["modules", "swiglu"])
@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (4, 1), (4, 4), (6, 2), (6, 3)])
def test_two_levels_give_the_same_bits(kind, size, per_node):
    layer, inputs = helpers.whole_layer(kind, 7, 3), helpers.tokens_of([3, 0, 5, 2, 8, 1][:size])
    for one, two in zip(trained(layer, inputs), trained(layer, inputs, per_node), strict=True):
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[1], two[1])
        assert all(torch.equal(grad, two[2][name]) for name, grad in one[2].items())


def test_bytes_are_those_of_rows_for_other_ranks():
    layer, inputs = helpers.whole_layer("swiglu", 5, 2), helpers.tokens_of([4, 0, 9])
    with torch.no_grad():
        chosen = [layer.gate(x).counts for x in inputs]
    for rank, (*_, own, nbytes) in enumerate(trained(layer, inputs)):
        held = own.experts.held
        ours = int(chosen[rank][held.start : held.stop].sum())
        sent = int(chosen[rank].sum()) - ours
        received = sum(int(counts[held.start : held.stop].sum()) for counts in chosen) - ours
        counts = (5 - len(held) + 2) * 8  # of the others' experts, and a note to each of two ranks
        # there and back, forward and backward
        assert nbytes == counts + 2 * (sent + received) * helpers.HIDDEN * 4


def test_ranks_without_gradients_take_part_in_backward():
    layer, inputs = helpers.whole_layer("swiglu", 1, 1), helpers.tokens_of([3, 2])
    copies = [copy.deepcopy(layer) for _ in inputs]

    def work(world):
        own = copies[world.rank]
        own.gate.requires_grad_(False)
        own.set_expert_group(world.comm)  # rank 1 has no expert
        y, _ = own(inputs[world.rank])
        y.sum().backward()
        return own.experts.gate_up_proj.grad

    grads = sim.run(2, work)
    whole = copy.deepcopy(layer)
    whole(torch.cat(inputs))[0].sum().backward()
    assert_close(grads[0], whole.experts.gate_up_proj.grad)
    assert grads[1] is None


def test_without_gradients_nothing_travels_back():
    inputs = helpers.tokens_of([3, 2])
    copies = [helpers.whole_layer("modules", 2, 1) for _ in inputs]

    def work(world):
        own = copies[world.rank]
        own.set_expert_group(world.comm)
        with torch.no_grad():
            y, _ = own(inputs[world.rank])
        return y

    for y, x in zip(sim.run(2, work), inputs, strict=True):
        assert not y.requires_grad
        assert_close(y, helpers.looped(helpers.whole_layer("modules", 2, 1), x)[0].detach())


def test_bfloat16_sums_choices_in_fp32():
    layer = helpers.whole_layer("swiglu", 4, 3).to(torch.bfloat16)
    x = helpers.tokens_of([50])[0].bfloat16()
    y, routing = layer(x)
    outputs = torch.stack([helpers.expert_output(layer.experts, number, x) for number in range(4)])
    total = torch.zeros(50, helpers.HIDDEN)
    for choice in range(3):
        picked = outputs[routing.experts[:, choice], torch.arange(50)].float()
        total += picked * routing.weights[:, choice, None]
    assert y.dtype == torch.bfloat16
    assert routing.weights.dtype == torch.float32
    assert_close(y, total.bfloat16(), rtol=2**-7, atol=2**-7)  # a group of rows may sum a product otherwise than one


def test_grouped_products_equal_the_loop():
    if not hasattr(nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    found = {}
    for compute in ("loop", "grouped"):
        torch.manual_seed(0)
        experts = SwiGLUExperts(16, 8, 4)
        experts.compute = compute
        rows = torch.randn(12, 16, requires_grad=True)
        experts(rows, [5, 0, 7, 0]).sin().sum().backward()
        found[compute] = [rows.grad, *(param.grad for param in experts.parameters())]
    for loop, grouped in zip(found["loop"], found["grouped"], strict=True):
        assert_close(loop, grouped)
    assert not found["loop"][1][1].any()


def test_fused_experts_are_drawn_alike_on_any_number_of_ranks():
    torch.manual_seed(3)
    whole = SwiGLUExperts(4, 6, 5)

    def work(world):
        return world

    worlds = sim.run(2, work)
    for world in worlds:
        torch.manual_seed(3)
        own = SwiGLUExperts(4, 6, 5, world.comm)
        held = own.held
        assert torch.equal(own.down_proj, whole.down_proj[held.start : held.stop])
        assert torch.equal(own.gate_up_proj, whole.gate_up_proj[held.start : held.stop])


def test_a_group_is_set_once():
    layer = helpers.whole_layer("swiglu", 4, 1)

    def work(world):
        layer.set_expert_group(world.comm)
        with pytest.raises(UsageError, match="has its group of 1 ranks already"):
            layer.set_expert_group(world.comm)

    sim.run(1, work)


def test_a_part_of_the_experts_needs_a_group():
    layer = helpers.whole_layer("swiglu", 4, 1)
    layer.experts = ExpertModules(helpers.Block(), 4, 2)
    with pytest.raises(UsageError, match="2 of 4 experts are on this rank"):
        layer(torch.randn(3, helpers.HIDDEN))


def test_parts_that_do_not_fit_to_each_other_are_refused():
    with pytest.raises(ConfigError, match="a router of 4 experts for a layer of 6"):
        RoutedExperts(Router(8, 4), SwiGLUExperts(8, 16, 6))
    with pytest.raises(ConfigError, match="ep_size = 0 ranks cannot share experts out"):
        RoutedExperts(Router(8, 4), SwiGLUExperts(8, 16, 4), ep_size=0)
    with pytest.raises(ConfigError, match="num_experts = 0: a router of experts needs at least one"):
        Router(8, 0)
    with pytest.raises(UsageError, match="tokens of width 9 for a layer of experts with hidden_size = 8"):
        RoutedExperts(Router(8, 4), SwiGLUExperts(8, 16, 4))(torch.randn(3, 9))
    narrow = RoutedExperts(Router(8, 4), ExpertModules(nn.Linear(8, 2), 4))
    with pytest.raises(UsageError, match=r"an expert \(Linear\) made \(\d, 2\) of rows \(\d, 8\)"):
        narrow(torch.randn(3, 8))


def test_experts_that_do_not_fit_a_group_are_refused():
    with pytest.raises(ConfigError, match="holds 2 of 4 experts"):
        ExpertModules(helpers.Block(), 4, 2).keep(range(3))


def test_nodes_of_other_sizes_are_refused():
    def work(world):
        with pytest.raises(TopologyError, match="3 ranks of experts cannot be nodes of 2"):
            split_by_node(world.comm, 2)

    sim.run(3, work)
