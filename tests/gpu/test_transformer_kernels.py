"""GELU, dropout and the split of projections on a GPU, against their references, the bits of the mask and fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpispeed.native import rotary, transformer
from mpispeed.native.cuda import philox
from mpispeed.native.rotary import rotary_tables
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu, gelu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A few roundings of fp32 relative to the largest value, sums of 5,000 numbers; then one rounding to the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 1), (700, 3), (300, 31), (7000, 32), (1000, 33), (5, 1000), (5000, 1024), (2000, 4096), (20, 4097)]
SEED = torch.tensor(987654321987654321)
ops = torch.ops.mpispeed


def off(a, b):
    """The largest difference, relative to the largest of `a`."""
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-3)).item()


def inputs(rows, cols, dtype, shift, device):
    torch.manual_seed(rows * cols)
    sizes = [rows * cols] * 3 + [cols]
    flat = [2 * torch.randn(n + shift, device=device).to(dtype)[shift:] for n in sizes]
    return *(t.view(rows, cols) for t in flat[:3]), flat[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu(shape, dtype, device):
    for shift in (0, 1):
        x, _, dy, bias = inputs(*shape, dtype, shift, device)
        for b, exact in ((bias, False), (None, False), (bias, True)):
            z = x.double() if b is None else x.double() + b.double()
            z.requires_grad_()
            wanted = F.gelu(z, approximate="none" if exact else "tanh")
            (slope,) = torch.autograd.grad(wanted, z, dy.double())
            assert off(wanted, ops.bias_gelu(x, b, exact)) <= TOLERANCE[dtype]
            dx, dbias = ops.bias_gelu_backward(dy, x, b, exact, b is not None)
            assert off(slope, dx) <= TOLERANCE[dtype]
            assert b is None or off(slope.sum(0), dbias) <= 2 * TOLERANCE[dtype]
            assert off(transformer.gelu_reference(x, b, exact), ops.bias_gelu(x, b, exact)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_has_the_bits_of_the_twin(shape, dtype, device):
    for shift in (0, 1):
        x, residual, dy, bias = inputs(*shape, dtype, shift, device)
        for b, ratio in ((bias, 0.25), (None, 0.5), (bias, 0.0)):
            seed = SEED if ratio else None
            wanted = transformer.drop_reference(x, b, residual, ratio, seed)
            assert torch.equal(wanted, bias_dropout_residual(x, b, residual, ratio, seed))
            wanted = transformer.drop_backward_reference(dy, ratio, seed)
            got = ops.bias_dropout_residual_backward(dy, ratio, seed, True, b is not None)
            assert torch.equal(wanted[0], got[0])
            assert b is None or off(wanted[1], got[1]) <= 2 * TOLERANCE[dtype]


def test_the_mask_is_that_of_the_host(device):
    one = torch.ones(333, 40, device=device)
    y = bias_dropout_residual(one, None, torch.zeros_like(one), 0.3, SEED)
    assert torch.equal((y != 0).cpu().flatten(), philox.kept(int(SEED), y.numel(), 0.3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "rotated", "is_halved"),
    [(16, 16, 64, 0, True), (12, 4, 64, 64, True), (8, 2, 128, 64, False), (4, 2, 10, 6, True), (3, 3, 9, 6, False)],
)
def test_split_has_the_bits_of_the_twin(heads, key_heads, size, rotated, is_halved, dtype, device):
    torch.manual_seed(1)
    cols = (heads + 2 * key_heads) * size
    tables = rotary_tables(257, rotated, device=device) if rotated else (None, None)
    for shift in (0, 1):
        qkv = torch.randn(3 * 257 * cols + shift, device=device).to(dtype)[shift:].view(3, 257, cols)
        bias = torch.randn(cols, device=device).to(dtype)
        wanted = rotary.split_reference(qkv, bias, *tables, heads, key_heads, is_halved)
        got = ops.split_qkv(qkv, bias, *tables, heads, key_heads, is_halved)
        assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
        whole, dbias = rotary.merge_reference(*wanted, *tables, is_halved)
        back, sums = ops.merge_qkv(*wanted, *tables, is_halved, True)
        assert torch.equal(whole, back)
        assert off(dbias, sums) <= 2 * TOLERANCE[dtype]


def test_more_elements_than_32_bits_count(device):
    x = torch.randn(2**31 + 8, device=device, dtype=torch.bfloat16)
    last = x[-16:].clone()
    assert off(F.gelu(last, approximate="tanh"), gelu(x)[-16:]) <= 2**-7
    kept = bias_dropout_residual(x, None, torch.zeros_like(x), 0.5, SEED)[-8:] != 0
    words = [philox_word(int(SEED), x.numel() - 8 + i) for i in range(8)]
    assert kept.tolist() == [word >= philox.threshold(0.5) for word in words]


def philox_word(seed, element):
    """One word of stream 0, in Python's integers."""
    mask, counter, key = 0xFFFFFFFF, element // 4, [seed & 0xFFFFFFFF, seed >> 32]
    c = [counter & mask, counter >> 32, 0, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ key[0], second & mask, first >> 32 ^ c[3] ^ key[1], first & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[element % 4]


def test_repeatable_and_compiled(device):
    x, residual, dy, bias = inputs(4000, 1024, torch.bfloat16, 0, device)
    leaves = [t.requires_grad_() for t in (x, bias, residual)]

    def run(x, bias, residual):
        return bias_dropout_residual(bias_gelu(x, bias), bias, residual, 0.1, SEED)

    whole = torch.compile(run, fullgraph=True)
    runs = []
    for call in (run, run, whole):
        y = call(*leaves)
        runs.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert max(off(a, b) for a, b in zip(runs[0], runs[2], strict=True)) <= 2**-7


def test_the_mask_of_the_host_is_what_this_test_computes():
    """So that the long tensor above is compared with the right words."""
    words = philox.words(int(SEED), 24)
    assert [philox_word(int(SEED), i) for i in range(24)] == words.tolist()
