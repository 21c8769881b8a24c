"""GELU and dropout passes of a transformer layer: references against fp64, host kernels against them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpispeed.native import transformer
from mpispeed.native.cuda import launcher, philox
from mpispeed.native.transformer import bias_dropout_residual, bias_gelu, gelu
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A few roundings of fp32 relative to the largest value, then one to the dtype, which may fall to either side.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 1), (7, 3), (3, 31), (70, 32), (3, 33), (5, 1000), (9, 1024), (2, 4097)]
SEED = torch.tensor(987654321987654321)
ops = torch.ops.mpispeed


@pytest.fixture(params=[False, True], ids=["in order", "reversed"])
def host(request):
    """Kernels on the host, in one of the two orders of threads."""
    launched = HostLauncher(is_reversed=request.param)
    with launcher.standing_in(launched):
        yield launched


def off(a, b):
    """The largest difference, relative to the largest of `a`."""
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-3)).item() if a.numel() else 0


def inputs(rows, cols, dtype, *, shift=0):
    """x, residual, dy, bias; `shift` elements into larger tensors, so that 16 bytes do not fit."""
    torch.manual_seed(rows * cols)
    matrices = [2 * torch.randn(rows * cols + shift).to(dtype)[shift:].reshape(rows, cols) for _ in range(3)]
    return *matrices, torch.randn(cols + shift).to(dtype)[shift:]


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_is_torchs(dtype, approximate, host):
    x, _, dy, bias = inputs(5, 64, dtype)
    x[0, :8] = torch.tensor([0.0, -0.0, 6, -6, 12, -12, 300, -300])
    exact = [x.double().requires_grad_(), bias.double().requires_grad_()]
    wanted = F.gelu(exact[0] + exact[1], approximate=approximate)
    leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
    y = bias_gelu(*leaves, approximate)
    assert off(wanted, y) <= TOLERANCE[dtype]
    # Small values keep their digits: torch's 1 + tanh(u) does not for u below -4.
    assert torch.allclose(
        wanted[1:], y[1:].double(), rtol=2 * TOLERANCE[dtype] if approximate == "tanh" else 1, atol=1e-6
    )
    grads = torch.autograd.grad(wanted, exact, dy.double())
    assert max(off(a, b) for a, b in zip(grads, torch.autograd.grad(y, leaves, dy), strict=True)) <= TOLERANCE[dtype]
    assert host.launched[0] == f"gelu_{'tanh' if approximate == 'tanh' else 'exact'}_{launcher_tag(dtype)}"


def launcher_tag(dtype):
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_kernels_give_what_the_twin_gives(shape, dtype, host):
    for shift in (0, 1):
        x, _, dy, bias = inputs(*shape, dtype, shift=shift)
        for b, exact in ((bias, False), (None, False), (bias, True)):
            got = ops.bias_gelu(x, b, exact)
            assert off(transformer.gelu_reference(x, b, exact), got) <= TOLERANCE[dtype]
            wanted = transformer.gelu_backward_reference(dy, x, b, exact)
            got = ops.bias_gelu_backward(dy, x, b, exact, b is not None)
            for a, k in zip(wanted, got, strict=True) if b is not None else [(wanted[0], got[0])]:
                assert off(a, k) <= 2 * TOLERANCE[dtype]


def test_far_values_of_gelu(host):
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan"), -3e38, 3e38], requires_grad=True)
    y = gelu(x)
    y.sum().backward()
    assert torch.equal(y.nan_to_num(7), torch.tensor([1e30, 0, float("inf"), 7, 0, 3e38]).nan_to_num(7))
    assert torch.equal(x.grad.nan_to_num(7), torch.tensor([1.0, 0, 1, 7, 0, 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_kernels_give_the_bits_of_the_twin(shape, dtype, host):
    for shift in (0, 1):
        x, residual, dy, bias = inputs(*shape, dtype, shift=shift)
        for b, ratio in ((bias, 0.25), (None, 0.5), (bias, 0.0)):
            seed = SEED if ratio else None
            got = bias_dropout_residual(x, b, residual, ratio, seed)
            assert torch.equal(transformer.drop_reference(x, b, residual, ratio, seed), got)
            wanted = transformer.drop_backward_reference(dy, ratio, seed)
            got = ops.bias_dropout_residual_backward(dy, ratio, seed, True, b is not None)
            assert torch.equal(wanted[0], got[0])
            assert b is None or off(wanted[1], got[1]) <= 2 * TOLERANCE[dtype]  # another order of a sum


def test_the_mask_is_that_of_the_seed(host):
    zero, one = torch.zeros(33, 40), torch.ones(33, 40)
    y = bias_dropout_residual(one, None, zero, 0.3, SEED)
    kept = philox.kept(int(SEED), y.numel(), 0.3).view(33, 40)
    assert torch.equal(y != 0, kept)
    assert torch.equal(y[kept], torch.full((int(kept.sum()),), 1 / 0.7))
    assert 0.6 < kept.float().mean() < 0.8


def test_seeds_come_from_torchs_generator(host):
    x, residual, _, bias = inputs(8, 64, torch.float32)

    def run():
        torch.manual_seed(3)
        return bias_dropout_residual(x, bias, residual, 0.5), bias_dropout_residual(x, bias, residual, 0.5)

    first, second = run()
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), run(), strict=True))


def test_outside_of_training_nothing_is_drawn(host):
    x, residual, _, bias = inputs(8, 64, torch.float32)
    before = torch.get_rng_state()
    assert torch.equal(bias_dropout_residual(x, bias, residual, 0.5, training=False), residual + (x + bias))
    assert torch.equal(bias_dropout_residual(x, bias, residual, 0.0), residual + (x + bias))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("ratio", [0.0, 0.4])
def test_gradients_of_dropout(ratio, host):
    x, residual, dy, bias = inputs(6, 40, torch.float32)
    kept = philox.kept(int(SEED), x.numel(), ratio).view(x.shape) / (1 - ratio)
    exact = [t.double().requires_grad_() for t in (x, bias, residual)]
    wanted = torch.autograd.grad(exact[2] + kept * (exact[0] + exact[1]), exact, dy.double())
    leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
    got = torch.autograd.grad(bias_dropout_residual(*leaves, ratio, SEED), leaves, dy)
    assert max(off(a, b) for a, b in zip(wanted, got, strict=True)) <= 1e-6
    (only,) = torch.autograd.grad(bias_dropout_residual(x, leaves[1], residual, ratio, SEED), leaves[1:2], dy)
    assert torch.equal(only, got[1])


def test_only_wanted_gradients_are_made():
    host = HostLauncher()
    with launcher.standing_in(host):
        x, bias = torch.randn(3, 64, requires_grad=True), torch.zeros(64)
        bias_gelu(x, bias).sum().backward()
        assert host.launched == ["gelu_tanh_f32", "gelu_tanh_grad_f32"]
        host.launched.clear()
        bias_dropout_residual(x, bias, x, 0.0).sum().backward()
        assert host.launched == ["bias_dropout_residual_f32"]


def test_repeatable(host):
    x, residual, dy, bias = inputs(70, 96, torch.bfloat16)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, bias, residual)]
        y = bias_dropout_residual(bias_gelu(*leaves[:2]), leaves[1], leaves[2], 0.1, SEED)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    same_bits(run(), run())


def test_empty_and_with_gaps(host):
    bias = torch.ones(8, requires_grad=True)
    bias_gelu(torch.randn(0, 8), bias).sum().backward()
    bias_dropout_residual(torch.randn(0, 8), bias, torch.randn(0, 8), 0.5).sum().backward()
    assert torch.equal(bias.grad, torch.zeros(8))
    x = torch.randn(6, 16).T
    assert torch.equal(gelu(x), gelu(x.contiguous()))
    assert gelu(x).is_contiguous()
    assert off(F.gelu(torch.tensor(0.7), approximate="tanh"), gelu(torch.tensor(0.7))) < 1e-6


def leaf(*shape, dtype=torch.float64):
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype, requires_grad=True)


OPERATORS = [
    (ops.bias_gelu.default, (leaf(3, 5), leaf(5), False)),
    (ops.bias_gelu.default, (leaf(3, 5), None, True)),
    (ops.bias_gelu_backward.default, (leaf(3, 5).detach(), leaf(3, 5).detach(), None, False, False)),
    (ops.bias_dropout_residual.default, (leaf(3, 5), leaf(5), leaf(3, 5), 0.5, SEED)),
    (ops.bias_dropout_residual.default, (leaf(3, 5), None, leaf(3, 5), 0.0, None)),
    (ops.bias_dropout_residual_backward.default, (leaf(3, 5).detach(), 0.5, SEED, True, True)),
    (ops.bias_dropout_residual_backward.default, (leaf(3, 5).detach(), 0.0, None, True, False)),
]


@pytest.mark.parametrize(("op", "arguments"), OPERATORS)
def test_they_are_operators_as_torch_wants_them(op, arguments):
    torch.library.opcheck(op, arguments)


def test_gradients_are_those_of_small_differences():
    for approximate in ("tanh", "none"):
        assert torch.autograd.gradcheck(lambda x, b, a=approximate: bias_gelu(x, b, a), (leaf(3, 5), leaf(5)))
    assert torch.autograd.gradcheck(
        lambda x, b, r: bias_dropout_residual(x, b, r, 0.4, SEED), (leaf(3, 5), leaf(5), leaf(3, 5))
    )


def test_compiled_as_one_graph():
    inputs = [leaf(4, 8, dtype=torch.float32), leaf(8, dtype=torch.float32)]
    torch._dynamo.reset()

    def step(x, bias):
        return bias_dropout_residual(bias_gelu(x, bias), bias, x, 0.5).sum()

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.manual_seed(8)
    wanted = torch.autograd.grad(step(*inputs), inputs)
    torch.manual_seed(8)
    got = torch.autograd.grad(whole(*inputs), inputs)
    assert all(torch.allclose(a, b) for a, b in zip(wanted, got, strict=True))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: bias_gelu(x, torch.ones(3)), r"bias is \(3,\); expected \(4,\)"),
        (lambda x: bias_gelu(x, None, "erf"), "approximate is 'erf'"),
        (lambda x: gelu(x.int()), "floating point"),
        (lambda x: bias_dropout_residual(x, None, x[:1], 0.5), "expected one shape"),
        (lambda x: bias_dropout_residual(x, None, x, 1.0), "ratio is 1.0"),
        (lambda x: bias_dropout_residual(x, None, x.double(), 0.5), "residual is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 4))
