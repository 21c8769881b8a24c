"""Faces are operators of torch: fake tensors, autograd, `torch.compile` and autocast take them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpispeed.base.errors import UsageError
from mpispeed.native import norm
from mpispeed.native.cuda import launcher, ops
from mpispeed.native.transformer import bias_dropout_residual
from tests.helpers.cuda_host import HostLauncher


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.fixture(scope="module")
def triple():
    """x -> 3x with a second output nobody needs, as a face would define it; defined once, as a process does."""

    def backward(ctx, grad, _):
        return None if grad is None else grad * 3

    op = ops.define(
        "triple_for_tests(Tensor x, Tensor? scale) -> (Tensor, Tensor)",
        lambda x, scale: (x * 3, x.new_empty(0)),
        lambda x, scale: (x.new_empty(x.shape), x.new_empty(0)),
        autocast=("x",),
        follow=("scale",),
    )
    ops.differentiate(op, lambda ctx, inputs, output: None, lambda ctx, grad, _: (backward(ctx, grad, None), None))
    return op


def test_a_second_derivative_is_refused(triple):
    x = leaf(3)
    (grad,) = torch.autograd.grad(triple(x, None)[0].square().sum(), x)
    assert torch.allclose(grad, 18 * x)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(triple(x, None)[0].square().sum(), x, create_graph=True)


def test_a_second_derivative_in_what_was_saved_is_refused():
    """The gradient that comes in is constant here; only the saved weight leads back to a leaf."""
    op = ops.define(
        "times_for_tests(Tensor x, Tensor y) -> Tensor", lambda x, y: x * y, lambda x, y: x.new_empty(x.shape)
    )
    ops.differentiate(
        op,
        lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
        lambda ctx, grad: (op(grad, ctx.saved_tensors[0]), None),
    )
    x, y = leaf(3), leaf(3)
    assert torch.autograd.grad(op(x, y.detach()).sum(), x, create_graph=True)[0].equal(y.detach())
    assert torch.autograd.grad(op(x, y).sum(), x)[0].equal(y)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(op(x, y).sum(), x, create_graph=True)


def test_unused_outputs_cost_nothing(triple):
    x = leaf(3)
    assert torch.autograd.grad(triple(x, None)[1].sum(), x, allow_unused=True) == (None,)


def test_autocast_brings_arguments_to_one_dtype(triple):
    seen = []
    op = ops.define(
        "pair_for_tests(Tensor x, Tensor? y, Tensor? follows) -> Tensor",
        lambda x, y, follows: seen.append([t if t is None else t.dtype for t in (x, y, follows)]) or x.clone(),
        lambda x, y, follows: x.new_empty(x.shape),
        autocast=("x", "y"),
        follow=("follows",),
    )
    low, high = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        op(low, high, low)
        op(low, low, high)
        op(low, None, high)
        op(low, None, None)
    op(low, None, high)
    assert seen == [
        [torch.float32] * 3,
        [torch.bfloat16] * 3,
        [torch.bfloat16, None, torch.bfloat16],
        [torch.bfloat16, None, None],
        [torch.bfloat16, None, torch.float32],
    ]


def test_dtypes_have_to_fit_outside_of_autocast():
    x, weight = torch.randn(2, 8).bfloat16(), torch.ones(8, requires_grad=True)
    with pytest.raises(ValueError, match=r"weight is torch.float32 on cpu and x is torch.bfloat16"):
        norm.layer_norm(x, weight, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm.layer_norm(x, weight, None)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


NORM_CASES = [
    (leaf(3, 5, 8), None, leaf(8), leaf(8), 1e-5, True),
    (leaf(4, 8), leaf(4, 8), leaf(8), leaf(8), 1e-5, True),
    (leaf(4, 8, dtype=torch.float32), leaf(4, 8, dtype=torch.float32), leaf(8, dtype=torch.float32), None, 1e-6, False),
    (leaf(4, 8), None, None, None, 1e-6, False),
]


@pytest.mark.parametrize("arguments", NORM_CASES)
def test_the_norm_is_an_operator_as_torch_wants_it(arguments):
    torch.library.opcheck(torch.ops.mpispeed.norm.default, arguments)


@pytest.mark.parametrize("arguments", NORM_CASES[:2])
def test_the_norm_backward_is_an_operator_as_torch_wants_it(arguments):
    x, residual, weight, _, eps, is_centered = (a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    _, _, mean, rstd = torch.ops.mpispeed.norm(x, residual, weight, None, eps, is_centered)
    torch.library.opcheck(torch.ops.mpispeed.norm_backward.default, (x, residual, x, weight, mean, rstd, True, False))


FUNCTIONS = {
    "layer_norm": lambda x, r, w, b: norm.layer_norm(x, w, b),
    "add_layer_norm": lambda x, r, w, b: torch.cat(norm.add_layer_norm(x, r, w, b)),
    "rms_norm": lambda x, r, w, b: norm.rms_norm(x * 1, w) + 0 * b,
    "add_rms_norm": lambda x, r, w, b: torch.cat(norm.add_rms_norm(x, r, w)) + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_small_differences(name):
    inputs = (leaf(3, 6), leaf(3, 6), leaf(6), leaf(6))
    assert torch.autograd.gradcheck(FUNCTIONS[name], inputs)


@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm"])
def test_compiled_as_one_graph(name):
    inputs = [leaf(4, 8, dtype=torch.float32), leaf(4, 8, dtype=torch.float32)]
    inputs += [leaf(8, dtype=torch.float32), leaf(8, dtype=torch.float32)]
    torch._dynamo.reset()

    def step(*arguments):
        return (FUNCTIONS[name](*arguments).tanh() * 2).sum()

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(step(*inputs), inputs, allow_unused=True)
    got = torch.autograd.grad(whole(*inputs), inputs, allow_unused=True)
    for a, b in zip(wanted, got, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def test_compiled_within_autocast():
    x, weight = leaf(4, 8, dtype=torch.float32), leaf(8, dtype=torch.float32)
    torch._dynamo.reset()

    def step(x, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return norm.rms_norm(x @ x.T @ x, weight).float().sum()

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(step(x, weight), (x, weight))
    got = torch.autograd.grad(whole(x, weight), (x, weight))
    # Products of bf16, which are summed up in another order: some roundings of 2^-8.
    assert all(
        torch.allclose(a, b, rtol=0.05, atol=0.05 * float(a.abs().max())) for a, b in zip(wanted, got, strict=True)
    )


def test_compiled_code_launches_kernels():
    x, weight = torch.randn(4, 8), torch.randn(8)
    torch._dynamo.reset()
    whole = torch.compile(norm.rms_norm, fullgraph=True, backend="aot_eager")
    host = HostLauncher()
    with launcher.standing_in(host):
        y = whole(x, weight)
    assert host.launched == ["rms_norm_kept_f32"]
    assert torch.allclose(y, norm.rms_norm(x, weight), atol=1e-6)  # another order of a sum of 8


def test_compiled_for_any_number_of_rows():
    weight = leaf(8, dtype=torch.float32)
    torch._dynamo.reset()
    whole = torch.compile(norm.rms_norm, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5, 9):
        x = leaf(rows, 8, dtype=torch.float32)
        pairs = [torch.autograd.grad(call(x, weight).square().sum(), (x, weight)) for call in (norm.rms_norm, whole)]
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def test_a_recomputed_dropout_drops_the_same():
    x, bias = leaf(4, 8, dtype=torch.float32), leaf(8, dtype=torch.float32)

    def step(x, bias):
        return bias_dropout_residual(x, bias, x, 0.5).square().sum()

    grads = []
    for call in (step, lambda *inputs: checkpoint(step, *inputs, use_reentrant=False)):
        torch.manual_seed(4)
        grads.append(torch.autograd.grad(call(x, bias), (x, bias)))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_threads_may_call_operators_at_once():
    x, weight = torch.randn(64, 64), torch.randn(64)
    wanted = norm.rms_norm(x, weight)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(wanted, y) for y in pool.map(lambda _: norm.rms_norm(x, weight), range(40)))
