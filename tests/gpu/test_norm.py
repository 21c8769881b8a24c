"""Norms on a GPU: kernels against their reference on the host and fp64, any alignment, long rows, many rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpispeed.native import norm
from mpispeed.native.drop_norm import bias_dropout_layer_norm
from mpispeed.native.transformer import bias_dropout_residual

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sums of up to 40,000 numbers near 1 in another order, relative to the largest result; then one rounding.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 1), (300, 31), (4097, 32), (1000, 33), (5, 1000), (4000, 1024), (777, 2048), (500, 2056), (600, 4096)]
SHAPES += [(100, 4097), (300, 8192), (50, 9000), (20, 40960)]


def off(a, b):
    """The largest difference, relative to the largest of `a`."""
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-3)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_centered", [True, False], ids=["layer", "rms"])
def test_kernels_give_what_twin_and_fp64_give(shape, is_centered, dtype, device):
    torch.manual_seed(shape[1])
    rows, cols = shape
    for shift in (0, 1):
        sizes = [rows * cols] * 3 + [cols, cols]
        flat = [torch.randn(n + shift, device=device).to(dtype)[shift:] for n in sizes]
        x, residual, dy = (t.view(rows, cols) for t in flat[:3])
        weight, bias = flat[3], flat[4] if is_centered else None
        add = residual if shift == 0 else None
        total = x if add is None else x + add
        got = torch.ops.mpispeed.norm(x, add, weight, bias, 1e-5, is_centered)
        wide = [t if t is None else t.double() for t in (total, weight, bias)]
        exact = norm.norm_reference(wide[0], None, *wide[1:], 1e-5, is_centered)
        reference = norm.norm_reference(x, add, weight, bias, 1e-5, is_centered)
        assert off(exact[0], got[0]) <= TOLERANCE[dtype]
        assert off(reference[0], got[0]) <= TOLERANCE[dtype]
        assert off(exact[3], got[3]) <= 1e-5
        if add is not None:
            assert torch.equal(reference[1], got[1])
        mean = got[2] if is_centered else None
        grads = torch.ops.mpispeed.norm_backward(dy, add, total, weight, mean, got[3], True, is_centered)
        exact_mean = exact[2] if is_centered else None
        wanted = norm.norm_backward_reference(
            dy.double(), None if add is None else add.double(), total.double(), weight.double(), exact_mean, exact[3]
        )
        for a, b in zip(wanted[: 2 + is_centered], grads, strict=False):
            assert off(a, b) <= 3 * TOLERANCE[dtype] or cols == 1


def test_as_torchs_and_repeatable(device):
    torch.manual_seed(1)
    x = torch.randn(64, 128, 1024, device=device).bfloat16()
    leaves = [t.requires_grad_() for t in (x, torch.randn(1024, device=device).bfloat16(), torch.randn_like(x[0, 0]))]
    dy = torch.randn_like(x)

    def run():
        y = norm.layer_norm(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    theirs = F.layer_norm(leaves[0], (1024,), leaves[1], leaves[2])
    wanted = [theirs, *torch.autograd.grad(theirs, leaves, dy)]
    assert max(off(a, b) for a, b in zip(wanted, first, strict=True)) <= 2**-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 31), (4000, 1024), (600, 4096), (100, 4097)])
def test_dropout_and_norm_in_one_pass_are_one_after_the_other(shape, dtype, device):
    torch.manual_seed(2)
    seed = torch.tensor(123456789123456789)
    x, residual, dy, dtotal = (torch.randn(shape, device=device).to(dtype) for _ in range(4))
    parameters = [torch.randn(shape[1], device=device).to(dtype) for _ in range(3)]
    leaves = [t.requires_grad_() for t in (x, parameters[0], residual, *parameters[1:])]
    total = bias_dropout_residual(*leaves[:3], 0.3, seed)
    wanted = (total, norm.layer_norm(total, *leaves[3:]))
    got = bias_dropout_layer_norm(*leaves, 0.3, seed=seed)
    assert torch.equal(wanted[0], got[0])
    assert off(wanted[1], got[1]) <= TOLERANCE[dtype]  # the compiler may fuse its products and sums otherwise
    wanted, got = (torch.autograd.grad(outs, leaves, (dtotal, dy)) for outs in (wanted, got))
    # The gradient around the norm is added before the rounding, not after it.
    assert max(off(a, b) for a, b in zip(wanted, got, strict=True)) <= 3 * TOLERANCE[dtype]


def test_more_elements_than_32_bits_count(device):
    rows, cols = 2**21 + 3, 1024
    x = torch.randn(rows, cols, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(cols, device=device, dtype=torch.bfloat16).requires_grad_()
    y = norm.rms_norm(x, weight)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    last = x.detach()[-5:].clone().requires_grad_()
    wanted = norm.norm_reference(last, None, weight, None, 1e-6, False)
    grads = norm.norm_backward_reference(last.detach(), None, last.detach(), weight.detach(), None, wanted[3].detach())
    assert off(wanted[0], y[-5:]) <= 2**-7
    assert off(grads[0], dx[-5:]) <= 2**-7


def test_autocast_and_compile(device):
    x = torch.randn(64, 256, device=device, requires_grad=True)
    weight, bias = torch.ones(256, device=device, requires_grad=True), torch.zeros(256, device=device)
    linear = torch.nn.Linear(256, 256, device=device)

    def step(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return norm.layer_norm(linear(x), weight, bias).float().square().mean()

    wanted, got = step(x), torch.compile(step, fullgraph=True)(x)
    torch.testing.assert_close(wanted, got, rtol=1e-2, atol=1e-2)
    got.backward()
    assert weight.grad.dtype == torch.float32
