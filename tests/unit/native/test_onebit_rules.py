"""Loops of 1-bit Adam and 0/1 Adam: equal to their references at every vector level, and close to fp64."""

from __future__ import annotations

import math

import pytest
import torch

from mpispeed.native import status
from mpispeed.native.flat import DECAY_L2
from mpispeed.native.multi_tensor_host import PAIRS, HostTable, Row
from mpispeed.native.reference_updates import run_reference
from mpispeed.optim.onebit_params import onebit_terms
from tests.zoo import has_same_bits

KERNELS = ["onebit_adam", "zero_one_coded", "zero_one_local", "zero_one_drift", "zero_one_settle"]
HALF_PAIRS = sorted((pair for pair in PAIRS if torch.float64 not in pair), key=str)
SIZES = (0, 1, 7, 16, 17, 55, 1100)
LR, BETAS, EPS = 1e-2, (0.9, 0.99), 1e-6


def terms_of(weight_decay=0.1, eps=EPS):
    return onebit_terms(lr=LR, betas=BETAS, eps=eps, weight_decay=weight_decay, grad_scale=1 / 3, rate_sum=0.07)


def start(kernel, count, dtype=torch.float32, state_dtype=torch.float32, grad_dtype=torch.float32):
    """Parameter, states and what stands for the gradient; every fifth variance is 0."""
    source = torch.Generator().manual_seed(count)
    param, m, u, grad = (torch.randn(count, generator=source) for _ in range(4))
    v = torch.rand(count, generator=source)
    v[::5] = 0.0
    states = {
        "onebit_adam": [m],
        "zero_one_coded": [m, v],
        "zero_one_local": [m, u, v],
        "zero_one_drift": [u],
        "zero_one_settle": [m, u, v],
    }[kernel]
    grad = v if kernel in ("onebit_adam", "zero_one_drift") else grad
    return param.to(dtype), [x.to(state_dtype) for x in states], grad.to(grad_dtype)


@pytest.fixture
def levels():
    """The module, its vector levels on this processor; afterwards the level is as before."""
    module = status.require("cpu_optim")
    before = module.vector_level()
    yield module, [level for level in (1, 3, 4) if level <= module.best_vector_level()]
    module.set_vector_level(before)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", HALF_PAIRS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_levels_and_twin_have_the_same_bits(kernel, weight_decay, dtypes, grad_dtype, levels):
    module, found = levels
    terms = terms_of(weight_decay)
    for count in SIZES:
        param, states, grad = start(kernel, count + 3, *dtypes, grad_dtype)
        for out_dtype in (None, torch.float32, torch.bfloat16, torch.float16):
            if out_dtype is None and kernel == "zero_one_local":
                continue
            results = []
            for level in (None, *found):
                p, *parts = (x.clone()[3:] for x in (param, *states))  # unaligned views
                out = None if out_dtype is None else torch.empty(count + 3, dtype=out_dtype)[3:]
                if level is None:
                    run_reference(kernel, p, parts, grad[3:], out, terms)
                else:
                    module.set_vector_level(level)
                    table = HostTable(kernel, [Row(p, tuple(parts), grad[3:], out)])
                    assert table.is_compiled
                    assert table.run([terms]) == []
                results.append([p, *parts, *([] if out is None else [out])])
            for other in results[1:]:
                assert all(map(has_same_bits, results[0], other)), (count, out_dtype)
            if kernel == "zero_one_local":
                assert has_same_bits(results[0][0], param[3:])


@pytest.mark.parametrize("kernel", KERNELS)
def test_threads_do_not_show(kernel, levels):
    module, found = levels
    count = 2**19 + 3
    param, states, grad = start(kernel, count)
    expected = [param.clone(), *(x.clone() for x in states), torch.empty(count)]
    run_reference(kernel, expected[0], expected[1:-1], grad, expected[-1], terms_of())
    for level in found:
        module.set_vector_level(level)
        got = [param.clone(), *(x.clone() for x in states), torch.empty(count)]
        HostTable(kernel, [Row(got[0], tuple(got[1:-1]), grad, got[-1])]).run([terms_of()], threads=3)
        assert all(map(has_same_bits, got, expected))


def in_double(kernel, p, states, g):
    """The formulas in fp64: (parameter or buffer or local parameter, states); the scale is for gradients alone."""
    v = g if kernel in ("onebit_adam", "zero_one_drift") else states[-1]
    is_live = v != 0
    root = torch.sqrt(v) + EPS

    def live(x):
        return torch.where(is_live, x, torch.zeros_like(x))

    if kernel == "zero_one_drift":
        return live(states[0] * root), states
    if kernel == "zero_one_settle":
        m, u, v = states
        return p + torch.where(is_live, g / root, u), [live(-g / 0.07), torch.zeros_like(u), v]
    m = states[0] if kernel == "onebit_adam" else BETAS[0] * states[0] + (1 - BETAS[0]) * g / 3
    m = live(m)
    if kernel == "zero_one_local":
        u = states[1] - LR * (m / root + 0.1 * (p + states[1]))
        return p + u, [m, u, v]
    return p - LR * (m / root + 0.1 * p), [m] if kernel == "onebit_adam" else [m, v]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_formulas(kernel, dtype):
    param, states, grad = start(kernel, 3001, dtype, dtype, dtype)
    wide, wide_states = in_double(kernel, param.double(), [x.double() for x in states], grad.double())
    out = torch.empty_like(param)
    HostTable(kernel, [Row(param, tuple(states), grad, out)]).run([terms_of()])
    # A handful of roundings, 6e-8 or 1e-16 each, of numbers near 1.
    bound = 1e-6 if dtype == torch.float32 else 1e-13
    for got, expected in zip([out, *states], [wide, *wide_states], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_eps_a_variance_of_zero_is_no_nan(kernel):
    param, states, grad = start(kernel, 100)
    out = torch.empty(100)
    HostTable(kernel, [Row(param, tuple(states), grad, out)]).run([terms_of(eps=0.0)])
    assert all(x.isfinite().all() for x in (param, out, *states))
    if kernel != "zero_one_drift":
        assert (states[0][::5] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_stays_where_it_is(kernel):
    param, states, grad = start(kernel, 100)
    grad[7] = math.nan
    out = torch.empty(100)
    HostTable(kernel, [Row(param, tuple(states), grad, out)]).run([terms_of()])
    assert out.isnan().nonzero().tolist() == [[7]]


def test_an_infinite_sum_of_rates_leaves_no_momentum():
    param, states, grad = start("zero_one_settle", 100)
    terms = onebit_terms(lr=0.0, betas=BETAS, eps=EPS, weight_decay=0.0, rate_sum=math.inf)
    HostTable("zero_one_settle", [Row(param, tuple(states), grad)]).run([terms])
    assert (states[0] == 0).all()


def test_refusals():
    param, states, grad = start("zero_one_local", 8)
    with pytest.raises(ValueError, match="zero_one_local: there is no out"):
        HostTable("zero_one_local", [Row(param, tuple(states), grad)])
    table = HostTable("zero_one_coded", [Row(param, (states[0], states[2]), grad)])
    with pytest.raises(ValueError, match="has no L2 decay"):
        table.run([terms_of()._replace(decay_mode=DECAY_L2)])
