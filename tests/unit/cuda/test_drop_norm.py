"""Dropout, residual and layer norm in one pass have the bits of one after the other."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native.cuda import launcher
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.native.norm import layer_norm
from mpispeed.native.transformer import bias_dropout_residual
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 31), (33, 33), (5, 1000), (32, 64), (2, 2056)]
SEED = torch.tensor(123456789123456789)


@pytest.fixture(params=[False, True], ids=["in order", "reversed"])
def host(request):
    """Kernels on the host, in one of the two orders of threads."""
    launched = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(launched):
        yield launched


def leaves_of(shape, dtype, shift=0):
    """x, its bias, residual, weight, bias; `shift` elements into larger tensors, so that 16 bytes do not fit."""
    torch.manual_seed(sum(shape))
    sizes = [shape, shape[-1:], shape, shape[-1:], shape[-1:]]
    flat = [torch.randn(torch.Size(size).numel() + shift).to(dtype)[shift:].view(size) for size in sizes]
    return [t.requires_grad_() for t in flat]


def one_after_the_other(x, x_bias, residual, weight, bias, ratio, training=True):
    total = bias_dropout_residual(x, x_bias, residual, ratio, SEED, training)
    return total, layer_norm(total, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_one_after_the_other(shape, dtype, host):
    for shift, ratio in ((0, 0.3), (1, 0.3), (0, 0.0)):
        leaves = leaves_of(shape, dtype, shift)
        if shift:
            leaves[1] = None
        wanted = one_after_the_other(*leaves, ratio)
        got = bias_dropout_layer_norm(*leaves, ratio, seed=SEED)
        same_bits(wanted, got)
        used = [leaf for leaf in leaves if leaf is not None]
        dy, dtotal = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        wanted = torch.autograd.grad(wanted, used, (dtotal, dy))
        got = torch.autograd.grad(got, used, (dtotal, dy))
        # The gradient around the norm is added before the rounding, not after it.
        bound = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        for a, b in zip(wanted, got, strict=True):
            assert (a.double() - b.double()).abs().max() <= 4 * bound * a.double().abs().max() + bound
    kinds = {name.rpartition("_")[0] for name in host.launched}
    assert {"drop_layer_norm_any", "bias_dropout_residual_grad"} <= kinds


def test_either_output_alone_and_outside_of_training(host):
    leaves = leaves_of((4, 16), torch.float32)
    for index in (0, 1):
        wanted = torch.autograd.grad(one_after_the_other(*leaves, 0.5)[index].sum(), leaves, allow_unused=True)
        got = bias_dropout_layer_norm(*leaves, 0.5, seed=SEED)[index]
        got = torch.autograd.grad(got.sum(), leaves, allow_unused=True)
        for a, b in zip(wanted, got, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, atol=1e-6)
    before = torch.get_rng_state()
    got = bias_dropout_layer_norm(*leaves, 0.5, training=False)
    wanted = one_after_the_other(*leaves, 0.5, training=False)
    same_bits(wanted, got)
    assert torch.equal(before, torch.get_rng_state())
    x, _, residual, _, _ = leaves
    (only,) = torch.autograd.grad(bias_dropout_layer_norm(x, None, residual, None, None, 0.0)[0].sum(), [x])
    assert torch.equal(only, torch.ones_like(x))


def test_it_is_an_operator_as_torch_wants_it():
    leaves = [leaf.double().detach().requires_grad_() for leaf in leaves_of((3, 8), torch.float32)]
    torch.library.opcheck(torch.ops.mpispeed.drop_norm.default, (*leaves, 0.5, SEED, 1e-5))
    assert torch.autograd.gradcheck(lambda *args: bias_dropout_layer_norm(*args, 0.4, seed=SEED), leaves)


def test_compiled_and_without_rows(host):
    leaves = leaves_of((4, 16), torch.float32)
    torch._dynamo.reset()

    def step(*args):
        total, y = bias_dropout_layer_norm(*args, 0.4, seed=SEED)
        return (total * y).sum()

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    pairs = [torch.autograd.grad(call(*leaves), leaves) for call in (step, whole)]
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))
    leaves = leaves_of((0, 16), torch.float32)
    step(*leaves).backward()
    assert torch.equal(leaves[3].grad, torch.zeros(16))


def test_what_does_not_fit_is_refused():
    x, _, residual, weight, bias = leaves_of((3, 4), torch.float32)
    with pytest.raises(ValueError, match="one shape"):
        bias_dropout_layer_norm(x, None, residual[:1], weight, bias, 0.5)
    with pytest.raises(ValueError, match=r"is \(3,\); expected \(4,\)"):
        bias_dropout_layer_norm(x, torch.ones(3), residual, weight, bias, 0.5)
    with pytest.raises(ValueError, match="ratio is -1"):
        bias_dropout_layer_norm(x, None, residual, weight, bias, -1)
