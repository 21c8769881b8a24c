"""Queries, keys and values out of a projection: reference against fp64, kernels on the host against the reference."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import rotary
from mpispeed.native.cuda import launcher
from mpispeed.native.rotary import merge_heads, rotary_tables, split_qkv
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ops = torch.ops.mpispeed
# batch, sequence, heads, key heads, size, rotated, pairs are halves of the rotated part
CASES = [
    (1, 1, 1, 1, 2, 2, True),
    (2, 5, 3, 3, 16, 0, True),
    (2, 7, 4, 2, 16, 16, True),
    (2, 7, 4, 1, 16, 16, False),
    (1, 33, 2, 2, 32, 16, True),
    (1, 9, 2, 2, 24, 8, False),
    (3, 4, 2, 1, 10, 6, True),
    (3, 4, 2, 1, 9, 6, False),
    (1, 3, 2, 2, 64, 24, True),
]


@pytest.fixture(params=[False, True], ids=["in order", "reversed"])
def host(request):
    """Kernels on the host, in one of the two orders of threads."""
    launched = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(launched):
        yield launched


def make(case, dtype, shift=0):
    """qkv, bias, tables; `shift` elements into larger tensors, so that 16 bytes do not fit."""
    batch, sequence, heads, key_heads, size, rotated, _ = case
    torch.manual_seed(sum(case))
    cols = (heads + 2 * key_heads) * size
    qkv = torch.randn(batch * sequence * cols + shift).to(dtype)[shift:].view(batch, sequence, cols)
    bias = torch.randn(cols).to(dtype)
    return qkv, bias, *(rotary_tables(sequence, rotated) if rotated else (None, None))


def formula(case, qkv, bias, cosine, sine):
    """By complex numbers, in fp64."""
    _, _, heads, key_heads, size, rotated, is_halved = case
    z = (qkv.double() + bias.double()).unflatten(-1, (-1, size)).transpose(1, 2)
    parts = list(z.split([heads, key_heads, key_heads], 1))
    half = rotated // 2
    for i in (0, 1) if rotated else ():
        head, rest = parts[i][..., :rotated], parts[i][..., rotated:]
        pairs = head.unflatten(-1, (2, half)).transpose(-1, -2) if is_halved else head.unflatten(-1, (half, 2))
        turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cosine.double(), sine.double())
        pairs = torch.view_as_real(turned)
        head = (pairs.transpose(-1, -2) if is_halved else pairs).flatten(-2)
        parts[i] = torch.cat((head, rest), -1)
    return parts


@pytest.mark.parametrize("case", CASES)
def test_the_twin_is_the_formula(case):
    qkv, bias, cosine, sine = make(case, torch.float32)
    leaves = [qkv.double().requires_grad_(), bias.double().requires_grad_()]
    wanted = formula(case, *leaves, cosine, sine)
    heads, key_heads, style = case[2], case[3], "half" if case[6] else "interleaved"
    given = {"key_heads": key_heads, "cosine": cosine, "sine": sine, "style": style}
    mine = [qkv.clone().requires_grad_(), bias.clone().requires_grad_()]
    got = split_qkv(*mine, heads, **given)
    grads = [torch.randn_like(part) for part in got]
    wanted_grads = torch.autograd.grad(wanted, leaves, [g.double() for g in grads])
    got_grads = torch.autograd.grad(got, mine, grads)
    for a, b in zip((*wanted, *wanted_grads), (*got, *got_grads), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b.double(), rtol=1e-5, atol=1e-5)  # a few roundings of values up to 20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_the_bits_of_the_twin(case, dtype, host):
    heads, key_heads, is_halved = case[2], case[3], case[6]
    for shift in (0, 1):
        qkv, bias, cosine, sine = make(case, dtype, shift)
        for b in (bias, None):
            wanted = rotary.split_reference(qkv, b, cosine, sine, heads, key_heads, is_halved)
            got = ops.split_qkv(qkv, b, cosine, sine, heads, key_heads, is_halved)
            same_bits(wanted, got)
        whole, dbias = rotary.merge_reference(*wanted, cosine, sine, is_halved)
        for with_bias in (True, False):
            got = ops.merge_qkv(*wanted, cosine, sine, is_halved, with_bias)
            assert torch.equal(whole, got[0])
        got = ops.merge_qkv(*wanted, cosine, sine, is_halved, True)[1]
        # Another order of a sum of up to 35 numbers, and a rounding to either side.
        assert torch.allclose(dbias.float(), got.float(), rtol=2 * torch.finfo(dtype).eps, atol=2e-5)
    assert {name.rpartition("_")[0] for name in host.launched} == {"split_qkv", "merge_qkv", "column_sum"}


def test_gradients_through_kernels(host):
    case = (2, 6, 4, 2, 16, 8, True)
    qkv, bias, cosine, sine = make(case, torch.float32)
    given = {"key_heads": 2, "cosine": cosine, "sine": sine}
    leaves = [qkv.double().requires_grad_(), bias.double().requires_grad_()]
    wanted = torch.autograd.grad([p.square().sum() for p in formula(case, *leaves, cosine, sine)], leaves)
    mine = [qkv.clone().requires_grad_(), bias.clone().requires_grad_()]
    got = torch.autograd.grad([p.square().sum() for p in split_qkv(*mine, 4, **given)], mine)
    assert all(torch.allclose(a, b.double(), rtol=1e-4, atol=1e-4) for a, b in zip(wanted, got, strict=True))
    (only,) = torch.autograd.grad(split_qkv(mine[0], bias, 4, **given)[2].sum(), mine[:1])
    assert torch.equal(only.sum(-1), torch.full((2, 6), 32.0))  # two heads of values, of 16 elements


def test_small_differences_and_operators():
    torch.manual_seed(2)
    cosine, sine = (t.double() for t in rotary_tables(3, 4))
    qkv = torch.randn(2, 3, 4 * 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)
    for style in ("half", "interleaved"):
        given = {"key_heads": 1, "cosine": cosine, "sine": sine, "style": style}
        assert torch.autograd.gradcheck(lambda x, b, g=given: split_qkv(x, b, 2, **g), (qkv, bias))
    torch.library.opcheck(ops.split_qkv.default, (qkv, bias, cosine, sine, 2, 1, True))
    torch.library.opcheck(ops.split_qkv.default, (qkv, None, None, None, 2, 1, False))
    parts = [part.detach() for part in split_qkv(qkv, bias, 2, key_heads=1)]
    torch.library.opcheck(ops.merge_qkv.default, (*parts, cosine, sine, False, True))


def test_compiled_as_one_graph():
    torch._dynamo.reset()
    qkv, bias, cosine, sine = make((2, 6, 2, 2, 16, 8, True), torch.float32)
    qkv.requires_grad_()

    def step(x):
        q, k, v = split_qkv(x, bias, 2, cosine=cosine, sine=sine)
        return merge_heads(q * k + v)

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted, got = step(qkv), whole(qkv)
    assert torch.equal(wanted, got)
    grads = [torch.autograd.grad(y.square().sum(), qkv)[0] for y in (wanted, got)]
    assert torch.allclose(*grads)


def test_heads_are_merged_as_they_were_cut():
    qkv = torch.randn(2, 5, 3 * 12)
    q, k, v = split_qkv(qkv, None, 3)
    assert torch.equal(torch.cat([merge_heads(part) for part in (q, k, v)], -1), qkv)


def test_empty(host):
    bias = torch.ones(12, requires_grad=True)
    q, _, _ = split_qkv(torch.randn(2, 0, 12), bias, 2)
    assert q.shape == (2, 2, 0, 2)
    q.sum().backward()
    assert torch.equal(bias.grad, torch.zeros(12))


def test_tables_of_far_positions():
    cosine, sine = rotary_tables(2, 4, first=100_000)
    angle = torch.tensor(100_001.0, dtype=torch.float64)
    assert torch.allclose(cosine[1].double(), torch.stack([angle.cos(), (angle / 100).cos()]), atol=1e-7)
    assert torch.allclose(cosine**2 + sine**2, torch.ones(2, 2))


X = torch.randn(2, 3, 24)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_qkv(X, None, 5), r"n \* 15"),
        (lambda: split_qkv(X[0], None, 2), r"shape \(3, 24\)"),
        (lambda: split_qkv(X, None, 4, key_heads=3), "to divide the first"),
        (lambda: split_qkv(X, torch.ones(8), 2), r"bias is \(8,\)"),
        (lambda: split_qkv(X, None, 2, cosine=torch.ones(3, 2)), "both or none"),
        (lambda: split_qkv(X, None, 2, cosine=torch.ones(3, 3), sine=torch.ones(3, 3)), "at most 4"),
        (lambda: split_qkv(X, None, 2, cosine=torch.ones(2, 2), sine=torch.ones(2, 2)), r"expected two \[3,"),
        (lambda: split_qkv(X, None, 2, style="pairs"), "style is 'pairs'"),
        (lambda: rotary_tables(3, 5), "even number"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
