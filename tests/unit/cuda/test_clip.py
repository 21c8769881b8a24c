"""The norm and the factor of an update on a device: the bits of the host, from the same limbs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native import exact_sum
from mpispeed.native.cuda.launcher import standing_in
from mpispeed.native.device_clip import norm_and_factor, norm_and_factor_reference
from mpispeed.native.device_optim import DeviceTable
from mpispeed.native.flat import Terms
from mpispeed.native.multi_tensor_host import STATE_NAMES, Row
from tests.helpers.cuda_host import HostLauncher

FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
CASES = [
    [], [5e-324], [2.0**-1022, 5e-324], [1.0, 2.0**-53], [1.0, 2.0**-53, 5e-324], [1.0 + 2.0**-52, 2.0**-53],
    [2.0**-1030 * 3], [1.7e308], [1.7e308, 1.7e308], [2.0**40 - 2.0**-12, 2.0**-13], [math.inf, 1.0], [math.nan, 1.0],
    [2.0**64], [2.0**32 - 2.0**-20], [0.1] * 40,
]  # fmt: skip


def on_host(limbs, scale, limit):
    total = exact_sum.value_of(limbs)
    if not math.isfinite(total):
        return total, math.nan
    norm = math.sqrt(total) / scale
    return norm, torch.tensor((min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0) / scale).item()


@pytest.fixture(scope="module")
def kernels():
    return HostLauncher()


def check(kernels, limbs, scale, limit):
    expected = on_host(limbs, scale, limit)
    with standing_in(kernels):
        found = norm_and_factor(limbs, scale=scale, limit=limit)
    for norm, factor in (found, norm_and_factor_reference(limbs, scale=scale, limit=limit)):
        assert (norm.dtype, factor.dtype) == (torch.float64, torch.float32)
        assert str((norm.item(), factor.item())) == str(expected)


@pytest.mark.parametrize("values", CASES, ids=str)
def test_halves_ends_and_what_is_not_finite(kernels, values):
    for ranks in (1, 3):
        check(kernels, exact_sum.limbs_of(values) * ranks, 1.0, 1.0)


@given(st.lists(FINITE, max_size=8), st.sampled_from([1.0, 3.0, 65536.0]), st.sampled_from([0.0, 0.7, 1e30]))
def test_the_bits_of_the_host(values, scale, limit):
    limbs = exact_sum.limbs_of(values[::2]) + exact_sum.limbs_of(values[1::2])
    check(HostLauncher(), limbs, scale, limit)


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("rule", ["adam", "adagrad", "lion"])
@pytest.mark.parametrize("factor", [math.nan, 0.25])
def test_an_update_by_nan_changes_nothing(rule, has_kernel, factor):
    def tensors(dtype):
        return torch.randn(1000, generator=torch.Generator().manual_seed(1)).abs().to(dtype)

    def updated(scale):
        row = Row(tensors(torch.float32), tuple(tensors(torch.float32) for _ in STATE_NAMES[rule]),
                  tensors(torch.bfloat16), tensors(torch.bfloat16))  # fmt: skip
        terms = Terms(beta1=0.9, beta2=0.99, step_size=0.1, eps=1e-8, decay=0.01, decay_mode=1, grad_scale=scale)
        table = DeviceTable(rule, [row])
        assert table.is_compiled == has_kernel
        scales = None if scale != 1.0 else [torch.tensor(factor)]
        table.run([terms], scales=scales)
        return [row.param, *row.states, row.out]

    def found(scale):
        if not has_kernel:
            return updated(scale)
        with standing_in(HostLauncher()):
            return updated(scale)

    if math.isnan(factor):
        assert all(torch.equal(x, tensors(x.dtype)) for x in found(1.0))
    else:
        assert all(torch.equal(a, b) for a, b in zip(found(1.0), found(factor), strict=True))
