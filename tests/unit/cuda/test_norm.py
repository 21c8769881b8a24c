"""Layer norm and RMS norm: reference against fp64, kernels on the host against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mpispeed.base.errors import UsageError
from mpispeed.native import norm
from mpispeed.native.cuda import launcher
from tests.helpers.cuda_host import HostLauncher
from tests.zoo import same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sums of up to 9,000 numbers near 1 in another order, relative to the largest result; then one rounding to the dtype.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(1, 1), (3, 31), (31, 32), (33, 33), (5, 1000), (32, 64), (9, 1024), (2, 2056)]
LONG = [(1, 4097), (2, 4096), (1, 9000)]


@pytest.fixture(params=[False, True], ids=["in order", "reversed"])
def host(request):
    """Kernels on the host, in one of the two orders of threads."""
    with launcher.standing_in(HostLauncher(is_reversed=request.param)) as _:
        yield


def off(a, b):
    """The largest difference, relative to the largest of `a`."""
    return ((a.double() - b.double()).abs().max() / a.double().abs().max().clamp_min(1e-3)).item() if a.numel() else 0


def inputs(rows, cols, dtype, *, shift=0):
    """x, residual, weight, bias, dy; `shift` elements into larger tensors, so that 16 bytes do not fit."""
    torch.manual_seed(rows * cols)

    def cut(*shape):
        whole = torch.randn(shape[0] * (shape[1] if len(shape) > 1 else 1) + shift).to(dtype)
        return whole[shift:].reshape(shape)

    return cut(rows, cols), cut(rows, cols), cut(cols), cut(cols), cut(rows, cols)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("shape", [(5, 1), (7, 33), (4, 1000)])
def test_the_twin_is_the_formula(shape, is_centered, dtype):
    x, _, weight, bias, dy = inputs(*shape, dtype)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    got = [t.clone().requires_grad_() for t in (x, weight, bias)]
    if is_centered:
        wanted = F.layer_norm(exact[0], shape[1:], exact[1], exact[2], 1e-5)
        y = norm.layer_norm(got[0], got[1], got[2], 1e-5)
    else:
        wanted = exact[0] * torch.rsqrt(exact[0].square().mean(-1, keepdim=True) + 1e-5) * exact[1] + 0 * exact[2].sum()
        y = norm.rms_norm(got[0], got[1], 1e-5)
    assert off(wanted, y) <= TOLERANCE[dtype]
    used = slice(None) if is_centered else slice(2)
    exact_grads = torch.autograd.grad(wanted, exact[used], dy.double())
    for a, b in zip(exact_grads, torch.autograd.grad(y, got[used], dy), strict=True):
        # A row of one element has no gradient but rounding.
        assert off(a, b) <= TOLERANCE[dtype] or shape[1] == 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES] + [(shape, torch.bfloat16) for shape in LONG],
)
def test_kernels_give_what_the_twin_gives(shape, dtype, host):
    for shift in (0, 1):
        x, residual, weight, bias, dy = inputs(*shape, dtype, shift=shift)
        for is_centered, add in ((True, residual), (False, None)) if shift else ((True, None), (False, residual)):
            b = bias if is_centered else None
            wanted = norm.norm_reference(x, add, weight, b, 1e-5, is_centered)
            got = torch.ops.mpispeed.norm(x, add, weight, b, 1e-5, is_centered)
            for name, a, k in zip(("y", "sum", "mean", "rstd"), wanted, got, strict=True):
                assert a.shape == k.shape, name
                assert off(a, k) <= (1e-4 if name == "mean" else TOLERANCE[dtype]), name  # means are near 0
            assert torch.equal(wanted[1], got[1])  # one addition, one rounding
            mean = wanted[2] if is_centered else None
            read = x if add is None else wanted[1]
            grads = norm.norm_backward_reference(dy, add, read, weight, mean, wanted[3])
            got = torch.ops.mpispeed.norm_backward(dy, add, read, weight, mean, wanted[3], True, True)
            for name, a, k in zip(("dx", "dweight", "dbias"), grads, got, strict=True):
                assert off(a, k) <= 2 * TOLERANCE[dtype] or shape[1] == 1, name


def test_each_way_is_taken(monkeypatch):
    host = HostLauncher()
    with launcher.standing_in(host):
        for cols, dtype in ((64, torch.float32), (2056, torch.float16), (2064, torch.float16), (33, torch.float32)):
            x = torch.randn(3, cols, dtype=dtype, requires_grad=True)
            weight = torch.ones(cols, dtype=dtype, requires_grad=True)
            norm.layer_norm(x, weight, None).sum().backward()
    assert host.launched == [
        "layer_norm_kept_f32", "layer_norm_backward_8_f32", "column_sum_f32",
        "layer_norm_kept_fp16", "layer_norm_backward_any_fp16", "layer_norm_columns_fp16", "column_sum_fp16",
        "layer_norm_kept_fp16", "layer_norm_backward_16_fp16", "column_sum_fp16",
        "layer_norm_any_f32", "layer_norm_backward_any_f32", "layer_norm_columns_f32", "column_sum_f32",
    ]  # fmt: skip


def test_only_wanted_gradients_are_made():
    host = HostLauncher()
    with launcher.standing_in(host):
        x, weight, bias = torch.randn(3, 64, requires_grad=True), torch.ones(64), torch.zeros(64, requires_grad=True)
        norm.layer_norm(x, weight, None).sum().backward()
        assert host.launched == ["layer_norm_kept_f32", "layer_norm_backward_8_f32"]
        norm.layer_norm(x.detach(), weight, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((64,), 3.0))


def test_without_rows_or_parameters(host):
    x = torch.randn(0, 8, requires_grad=True)
    weight = torch.ones(8, requires_grad=True)
    norm.rms_norm(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))
    x = torch.randn(3, 4, 40)
    assert off(F.layer_norm(x, (40,)), norm.layer_norm(x, None, None)) < 4e-6
    assert off(F.layer_norm(x[:, 1], (40,)), norm.layer_norm(x[:, 1], None, None)) < 4e-6  # rows with gaps


def test_repeatable(host):
    x, residual, weight, bias, dy = inputs(40, 96, torch.bfloat16)

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
        total, y = norm.add_layer_norm(*leaves)
        return [total, y, *torch.autograd.grad((total, y), leaves, (dy, dy))]

    same_bits(run(), run())


def test_a_residual_goes_through_in_the_same_pass(host):
    x, residual, weight, bias, dy = inputs(6, 64, torch.float32)
    leaves = [t.double().requires_grad_() for t in (x, residual, weight, bias)]
    total = leaves[0] + leaves[1]
    y = F.layer_norm(total, (64,), leaves[2], leaves[3])
    wanted = torch.autograd.grad((total, y), leaves, (2 * dy.double(), dy.double()))
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight, bias)]
    got = torch.autograd.grad(norm.add_layer_norm(*leaves), leaves, (2 * dy, dy))
    assert max(off(a, b) for a, b in zip(wanted, got, strict=True)) < 4e-6
    (only,) = torch.autograd.grad(norm.add_layer_norm(*leaves)[0], leaves[:1], dy)
    assert torch.equal(only, dy)


def test_gradients_beside_a_norm_are_added_in_its_pass():
    x, _, weight, bias, dy = inputs(6, 64, torch.float32)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = torch.autograd.grad((exact[0], F.layer_norm(exact[0], (64,), *exact[1:])), exact, (dy.double(),) * 2)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    host = HostLauncher()
    with launcher.standing_in(host):
        same, y = norm.layer_norm_beside(*leaves)
        assert torch.equal(same, x)
        assert torch.equal(y, norm.layer_norm(x, weight, bias))
        got = torch.autograd.grad((same, y), leaves, (dy, dy))
    assert max(off(a, b) for a, b in zip(wanted, got, strict=True)) < 4e-6
    assert host.launched.count("layer_norm_backward_8_f32") == 1
    (only,) = torch.autograd.grad(norm.layer_norm_beside(*leaves)[0], leaves[:1], dy)
    assert torch.equal(only, dy)


def test_a_second_derivative_beside_a_norm_is_refused():
    """Mean and deviation are saved as numbers: it would lack theirs."""
    leaves = [torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True), None]
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(norm.layer_norm_beside(*leaves)[1].square().sum(), leaves[:2], create_graph=True)


def test_beside_a_norm_compiled_and_within_autocast():
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), torch.ones(8, requires_grad=True)
    torch._dynamo.reset()

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same, y = norm.layer_norm_beside(x, weight, None)
            return (same * y).float().sum()

    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    wanted, got = (torch.autograd.grad(call(x), (x, weight)) for call in (step, whole))
    same_bits(wanted, got)
    assert wanted[1].dtype == torch.float32
    inputs = [t.double().detach().requires_grad_() for t in (x, weight, weight)]
    assert torch.autograd.gradcheck(norm.layer_norm_beside, inputs)


def test_not_a_number_stays_in_its_row(host):
    x = torch.randn(3, 64)
    x[1, 7] = float("nan")
    y = norm.layer_norm(x, None, None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


def test_large_means_do_not_cancel(host):
    x = torch.randn(4, 64) + 1000
    wanted = F.layer_norm(x.double(), (64,))
    assert off(wanted, norm.layer_norm(x, None, None)) < 1e-4  # x itself is rounded to 6e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(()), None, None), "last dim of 1 or more"),
        ((torch.ones(3, 4, dtype=torch.int32), None, None), "floating point"),
        ((torch.randn(3, 4), torch.ones(3), None), r"weight is \(3,\); expected \(4,\)"),
        ((torch.randn(3, 4), torch.ones(4), torch.ones(1, 4)), r"bias is \(1, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        norm.layer_norm(*arguments)


def test_a_residual_has_the_shape_of_x():
    with pytest.raises(ValueError, match="one shape"):
        norm.add_rms_norm(torch.randn(3, 4), torch.randn(4), None)
