"""Adam on host memory: accuracy, rounding, and bits that depend on nothing but the numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.native import status
from tests.helpers.host_updates import adam, adam_reference
from tests.zoo import has_same_bits

SIZES = [0, 1, 7, 15, 16, 17, 55, 1023, 1024, 1025, 2**20 + 3]
GRADS = [torch.float32, torch.bfloat16, torch.float16]
OUTS = [None, torch.bfloat16, torch.float16]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}


def make_state(count, seed=0):
    """Master, both moments, and a generator for gradients."""
    source = torch.Generator().manual_seed(seed)
    master = torch.randn(count, generator=source)
    exp_avg = torch.randn(count, generator=source) * 0.1
    exp_avg_sq = torch.rand(count, generator=source) * 0.01
    return [master, exp_avg, exp_avg_sq], source


def plain_double_adam(p, m, v, g, *, step, lr, betas, eps, weight_decay, decoupled, bias_correction=True):
    """The formulas of the optimizer written out in fp64, as an independent reference."""
    if not decoupled:
        g = g + weight_decay * p
    m.copy_(betas[0] * m + (1 - betas[0]) * g)
    v.copy_(betas[1] * v + (1 - betas[1]) * g * g)
    first = 1 - betas[0] ** step if bias_correction else 1.0
    second = 1 - betas[1] ** step if bias_correction else 1.0
    if decoupled:
        p.copy_(p - lr * weight_decay * p)
    p.copy_(p - (lr / first) * m / (torch.sqrt(v) / math.sqrt(second) + eps))


def test_the_compiled_module_is_the_one_under_test():
    assert status.compiled("cpu_optim") is not None


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_ten_steps_stay_close_to_fp64(count, decoupled):
    state, source = make_state(count)
    wide = [x.double() for x in state]
    settings = {**SETTINGS, "decoupled": decoupled}
    for step in range(1, 4 if count > 10_000 else 11):
        grad = torch.randn(count, generator=source)
        adam(*state, grad, step=step, **settings)
        plain_double_adam(*wide, grad.double(), step=step, **settings)
    # ten updates of at most 0.03 on values below 8: an ulp of the master (5e-7) each, and some for the quotient
    for got, expected in zip(state, wide, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=5e-6)


def test_one_step_is_within_the_stated_relative_error():
    state, source = make_state(4099)
    state[0].zero_()  # then the new master is the update itself
    wide = [x.double() for x in state]
    grad = torch.randn(4099, generator=source)
    adam(*state, grad, step=1000, **SETTINGS)
    plain_double_adam(*wide, grad.double(), step=1000, **SETTINGS)
    # the first moment may cancel: bound its error by its terms, three roundings of at most 2^-24 each
    scale = (wide[1].abs() + 0.2 * grad.double().abs()).clamp_min(1e-30)
    assert ((state[1].double() - wide[1]).abs() / scale).max() < 3 * 2**-24
    torch.testing.assert_close(state[2].double(), wide[2], rtol=3e-7, atol=0)
    torch.testing.assert_close(state[0].double(), wide[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_agrees_with_torch_optim(decoupled, weight_decay):
    state, source = make_state(1025)
    state[1].zero_()
    state[2].zero_()
    param = torch.nn.Parameter(state[0].clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([param], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 11):
        param.grad = torch.randn(1025, generator=source)
        settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": weight_decay, "decoupled": decoupled}
        adam(*state, param.grad, step=step, **settings)
        optimizer.step()
    # both are fp32 with another order of operations; ten updates of about 0.01
    torch.testing.assert_close(state[0], param.detach(), rtol=1e-5, atol=2e-6)


def test_without_bias_correction():
    state, source = make_state(300)
    wide = [x.double() for x in state]
    grad = torch.randn(300, generator=source)
    adam(*state, grad, step=3, bias_correction=False, **SETTINGS)
    plain_double_adam(*wide, grad.double(), step=3, bias_correction=False, **SETTINGS)
    torch.testing.assert_close(state[0].double(), wide[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grad_dtype", GRADS)
@pytest.mark.parametrize("out_dtype", OUTS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twin_has_the_same_bits(grad_dtype, out_dtype, decoupled, weight_decay):
    state, source = make_state(3001)
    reference = [x.clone() for x in state]
    out, twin_out = (None if out_dtype is None else torch.empty(3001, dtype=out_dtype) for _ in range(2))
    settings = {**SETTINGS, "decoupled": decoupled, "weight_decay": weight_decay}
    for step in (1, 2, 1000):
        grad = torch.randn(3001, generator=source).to(grad_dtype)
        adam(*state, grad, out=out, step=step, grad_scale=1 / 3, **settings)
        adam_reference(*reference, grad, out=twin_out, step=step, grad_scale=1 / 3, **settings)
    for got, expected in zip(state, reference, strict=True):
        assert has_same_bits(got, expected)
    if out is not None:
        assert has_same_bits(out, twin_out)
        assert has_same_bits(out, state[0].to(out_dtype))


@pytest.mark.parametrize("count", [1, 1025, 2**17 + 3])
@pytest.mark.parametrize("grad_dtype", GRADS)
def test_threads_do_not_change_bits(count, grad_dtype):
    state, source = make_state(count)
    again = [x.clone() for x in state]
    grad = torch.randn(count, generator=source).to(grad_dtype)
    outs = [torch.empty(count, dtype=torch.bfloat16) for _ in range(2)]
    adam(*state, grad, out=outs[0], step=2, threads=1, **SETTINGS)
    adam(*again, grad, out=outs[1], step=2, threads=3, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip([*state, outs[0]], [*again, outs[1]], strict=True))


@pytest.mark.parametrize("cut", [1, 15, 16, 63, 64, 65, 1000, 2047])
@pytest.mark.parametrize("grad_dtype", GRADS)
def test_cuts_and_unaligned_views_do_not_change_bits(cut, grad_dtype):
    state, source = make_state(2050)
    pieces = [x.clone() for x in state]
    grad = torch.randn(2050, generator=source).to(grad_dtype)
    outs = [torch.empty(2050, dtype=torch.float16) for _ in range(2)]
    adam(*state, grad, out=outs[0], step=2, **SETTINGS)
    for part in (slice(0, cut), slice(cut, 2050)):
        adam(*(x[part] for x in pieces), grad[part], out=outs[1][part], step=2, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip([*state, outs[0]], [*pieces, outs[1]], strict=True))


def test_grad_scale_is_applied_first_and_one_changes_nothing():
    state, source = make_state(500)
    plain, scaled = [x.clone() for x in state], [x.clone() for x in state]
    grad = torch.randn(500, generator=source)
    adam(*state, grad * 0.25, step=1, **SETTINGS)
    adam(*scaled, grad, step=1, grad_scale=0.25, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip(state, scaled, strict=True))
    one = [x.clone() for x in plain]
    adam(*plain, grad, step=1, **SETTINGS)
    adam(*one, grad, step=1, grad_scale=1.0, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip(plain, one, strict=True))


@pytest.mark.parametrize("grad_dtype", GRADS)
def test_nan_and_infinity_stay_where_they_are(grad_dtype):
    state, source = make_state(200)
    clean = [x.clone() for x in state]
    grad = torch.randn(200, generator=source).to(grad_dtype)
    bad = grad.clone()
    bad[3], bad[190] = math.nan, math.inf
    out = torch.empty(200, dtype=torch.bfloat16)
    adam(*clean, grad, step=1, **SETTINGS)
    adam(*state, bad, out=out, step=1, **SETTINGS)
    touched = torch.zeros(200, dtype=torch.bool)
    touched[[3, 190]] = True
    for got, expected in zip(state, clean, strict=True):
        assert has_same_bits(got[~touched], expected[~touched])
    assert all(x[3].isnan() for x in [*state, out])
    assert state[1][190] == math.inf
    assert state[2][190] == math.inf
    assert state[0][190].isnan()  # inf / inf


def every_sixteen_bit_value(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_gradient_is_read_exactly(dtype):
    grad = every_sixteen_bit_value(dtype)
    settings = {**SETTINGS, "weight_decay": 0.0, "betas": (0.0, 0.0)}
    state = [torch.zeros(2**16) for _ in range(3)]
    adam(*state, grad, step=1, **settings)
    expected = grad.float()
    assert torch.equal(state[1].nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_out_is_rounded_to_nearest_even_everywhere(dtype):
    exact = every_sixteen_bit_value(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middle = ((exact[1:].double() + exact[:-1].double()) / 2).float()  # exact: one more bit is enough
    around = [torch.nextafter(middle, torch.tensor(s * math.inf)) for s in (1, -1)]
    special = torch.tensor([math.inf, -math.inf, 65519.99, 65520.0, 65536.0, 1e30, 3.4e38, 1e-45, -0.0, 2**-25, 2**-24])
    master = torch.cat([exact, middle, *around, special])
    want = master.clone()
    out = torch.empty(master.numel(), dtype=dtype)
    moments = [torch.zeros_like(master) for _ in range(2)]
    adam(master, *moments, torch.zeros_like(master), out=out, step=1, **{**SETTINGS, "weight_decay": 0.0})
    assert has_same_bits(master, want)
    assert has_same_bits(out, want.to(dtype))


def test_out_may_be_the_memory_of_the_gradient():
    state, source = make_state(1000)
    grad = torch.randn(1000, generator=source).bfloat16()
    other = [x.clone() for x in state]
    out = torch.empty_like(grad)
    adam(*other, grad, out=out, step=1, **SETTINGS)
    adam(*state, grad, out=grad, step=1, **SETTINGS)
    assert has_same_bits(grad, out)


def test_fp64_masters_are_updated_in_fp64():
    state, source = make_state(100)
    state = [x.double() for x in state]
    wide = [x.clone() for x in state]
    grad = torch.randn(100, generator=source).double()
    adam(*state, grad, step=1, **SETTINGS)
    plain_double_adam(*wide, grad, step=1, **SETTINGS)
    torch.testing.assert_close(state[0], wide[0], rtol=1e-14, atol=1e-15)


def test_missing_module_runs_the_twin(monkeypatch):
    state, source = make_state(64)
    reference = [x.clone() for x in state]
    grad = torch.randn(64, generator=source)
    adam(*state, grad, step=1, **SETTINGS)
    monkeypatch.setattr(status, "compiled", lambda name: None)
    adam(*reference, grad, step=1, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip(state, reference, strict=True))


def test_wrong_arguments_are_refused_before_anything_is_written():
    state, source = make_state(64)
    before = [x.clone() for x in state]
    grad = torch.randn(64, generator=source)
    with pytest.raises(ValueError, match="grad has 63 elements but master has 64"):
        adam(*state, grad[:63], step=1, **SETTINGS)
    with pytest.raises(ValueError, match="out has strides"):
        adam(*state, grad, out=torch.empty(128, dtype=torch.bfloat16)[::2], step=1, **SETTINGS)
    with pytest.raises(ValueError, match="step is 0"):
        adam(*state, grad, step=0, **SETTINGS)
    with pytest.raises(ValueError, match="betas"):
        adam(*state, grad, step=1, **{**SETTINGS, "betas": (0.9, 1.0)})
    with pytest.raises(ValueError, match="threads is 0"):
        adam(*state, grad, step=1, threads=0, **SETTINGS)
    with pytest.raises(ValueError, match="share memory"):
        adam(state[0], state[1], state[1], grad, step=1, **SETTINGS)
    with pytest.raises(TypeError, match=r"grad has dtype torch\.int32"):
        adam(*state, grad.int(), step=1, **SETTINGS)
    with pytest.raises(ValueError, match="is on meta"):
        adam(*state, grad.to("meta"), step=1, **SETTINGS)
    assert all(has_same_bits(a, b) for a, b in zip(state, before, strict=True))
