"""Largest eigenvalues of blocks: against dense Hessians, and where there are none."""

import logging

import pytest
import torch

from mpispeed.base.errors import UsageError
from mpispeed.engine.curvature import Eigenvalue, Iteration, beside_largest, find_blocks, start_vector
from tests.helpers.hessians import BLOCKS, Attending, Scored, Single, batch, largest

# torch warns of the cycle between a parameter and a gradient with a graph, which is what the class is given.
pytestmark = pytest.mark.filterwarnings("ignore:Using backward")

SETTINGS = {"max_iter": 2000, "tol": 1e-7, "layer_name": "stack.blocks", "layer_num": BLOCKS}


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_eigenvalues_are_those_of_dense_hessians(scale):
    """Parts of the largest, for every parameter of a block; a scaled loss changes nothing."""
    model, data = Scored(), batch(12)
    wanted = largest(model, data)
    (model(*data) * scale).backward(create_graph=True)
    before = torch.get_rng_state()
    found = Eigenvalue(**SETTINGS).compute_eigenvalue(model, scale=scale)
    assert torch.equal(before, torch.get_rng_state())
    assert len(found) == sum(1 for _ in model.stack.blocks.parameters())
    for number, block in enumerate(model.stack.blocks):
        for param in block.parameters():
            assert found[id(param)][1] == number
            assert found[id(param)][0] == pytest.approx(abs(wanted[number]) / max(map(abs, wanted)), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [[-9.0, 1.0, 4.0], [0.0, 0.0, 0.0], [1e-12, 3e-12, 1e-13]])
def test_the_iteration_keeps_the_sign_and_the_size(values, dtype):
    """Also of matrices that are small beside `stability`."""
    basis = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    matrix = (basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.t()).to(dtype)
    start = start_vector([torch.zeros(3, dtype=dtype)], 0)
    found = Iteration(100, 1e-10).run(lambda vector: matrix @ vector, start)
    assert found == pytest.approx(max(values, key=abs), rel=1e-6)


def test_values_that_are_not_finite_count_as_zeros():
    diagonal = torch.tensor([2.0, float("nan"), float("inf")])
    assert Iteration(50, 1e-6).run(lambda vector: diagonal * vector, torch.ones(3)) == pytest.approx(2.0)


def test_zeros_become_ones():
    assert beside_largest([-4.0, 0.0, 1.0]) == [1.0, 1.0, 0.25]
    assert beside_largest([0.0, 0.0]) == [1.0, 1.0]


def test_gradients_without_a_graph_give_nothing(caplog):
    model = Scored()
    model(*batch(4)).backward()
    with caplog.at_level(logging.WARNING):
        assert Eigenvalue(**SETTINGS).compute_eigenvalue(model) == {}
    assert "create_graph=True" in caplog.text


def test_blocks_that_are_not_there_are_named():
    with pytest.raises(UsageError, match=r"lists of modules in it: stack\.blocks"):
        find_blocks(Scored(), "bert.encoder.layer", 2)
    with pytest.raises(UsageError, match="has 2 blocks"):
        find_blocks(Scored(), "stack.blocks", 3)
    with pytest.raises(UsageError, match="give the name"):
        Eigenvalue(layer_name="stack.blocks")
    frozen = Scored()
    frozen.stack.blocks[1].requires_grad_(False)
    with pytest.raises(UsageError, match="block 1 of"):
        find_blocks(frozen, "stack.blocks", 0)
    assert len(find_blocks(frozen, "stack.blocks", 1)) == 1


def test_fused_attention_is_refused_and_its_plain_form_is_not():
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    model = Attending()
    settings = SETTINGS | {"layer_name": "blocks", "layer_num": 1}
    model(x).backward(create_graph=True)
    with pytest.raises(UsageError, match="eager"):
        Eigenvalue(**settings).compute_eigenvalue(model)
    model.zero_grad()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(x).backward(create_graph=True)
    assert set(Eigenvalue(**settings).compute_eigenvalue(model).values()) == {(1.0, 0)}


def test_an_operator_that_torch_would_take_for_a_constant_is_refused():
    model = Scored()
    single = torch.nn.Sequential(model.stack, Single())
    single(batch(4)[0]).square().mean().backward(create_graph=True)
    with pytest.raises(UsageError, match="once_differentiable"):
        Eigenvalue(**SETTINGS | {"layer_name": "0.blocks"}).compute_eigenvalue(single)
