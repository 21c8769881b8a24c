"""Quantizers: worked values, equal rows, copied gradients, codes with the same bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.base.errors import UsageError
from mpispeed.nn.compression import Quantizer, encode, fake_quantize

SYMMETRIC, ASYMMETRIC = Quantizer(), Quantizer("asymmetric")


@pytest.mark.parametrize(
    ("bits", "quantizer", "values", "expected"),
    [
        # s = 2 * 4 / 8 = 1; 4 / 1 is beyond the greatest code, 3
        (3, SYMMETRIC, [-4.0, -0.6, 0.4, 4.0], [-4.0, -1.0, 0.0, 3.0]),
        # ties to even: 0.5 -> 0, 1.5 -> 2, -2.5 -> -2
        (3, SYMMETRIC, [0.5, 1.5, -2.5, 4.0], [0.0, 2.0, -2.0, 3.0]),
        # s = 8 / 8 = 1, z = -4; codes 0..7, so that 4 is cut
        (3, ASYMMETRIC, [-4.0, -0.75, 1.5, 4.0], [-4.0, -1.0, 2.0, 3.0]),
        # s = 4 / 16 = 0.25, z = round(1.1 / 0.25) * 0.25 = 1
        (4, ASYMMETRIC, [1.1, 2.0, 3.05, 5.1], [1.0, 2.0, 3.0, 4.75]),
        # mean 2, threshold 1.4, mean of 2.5 and 4
        (2, SYMMETRIC, [-2.5, 0.5, 1.0, 4.0], [-3.25, 0.0, 0.0, 3.25]),
        (1, SYMMETRIC, [-2.5, 0.5, 1.0, 4.0], [-2.0, 2.0, 2.0, 2.0]),
        (1, SYMMETRIC, [-3.0, 0.0, 1.0, 4.0], [-2.0, 0.0, 2.0, 2.0]),
        # rows of zeros, and of equal values
        (8, SYMMETRIC, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        (2, SYMMETRIC, [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        (8, ASYMMETRIC, [0.3, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3]),
    ],
)
def test_worked_values(bits, quantizer, values, expected):
    x = torch.tensor(values)
    assert torch.equal(fake_quantize(x, bits, quantizer), torch.tensor(expected))


def test_each_group_has_its_own_scale():
    x = torch.tensor([[1.0, 2.0, 4.0, -4.0], [10.0, 20.0, 40.0, -40.0]])
    whole, rows = (fake_quantize(x, 3, Quantizer(groups=groups)) for groups in (1, 2))
    assert torch.equal(rows[0], fake_quantize(x[0], 3, SYMMETRIC))
    assert torch.equal(rows[1], rows[0] * 10)
    assert not torch.equal(whole, rows)


FLOATS = st.floats(-100, 100, width=32)
QUANTIZERS = st.sampled_from(
    [(bits, "symmetric") for bits in (1, 2, 3, 4, 8, 12, 16)] + [(bits, "asymmetric") for bits in (3, 8, 16)]
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(lambda g: st.lists(FLOATS, min_size=4 * g, max_size=4 * g).map(lambda v: (g, v))),
    QUANTIZERS,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_codes_have_the_bits_of_fake_quantization(drawn, how, dtype):
    (groups, values), (bits, kind) = drawn, how
    x = torch.tensor(values).to(dtype).view(2, -1)
    codes = encode(x, bits, Quantizer(kind, groups=groups))
    found = codes.values()
    assert found.dtype == dtype
    assert torch.equal(found, fake_quantize(x, bits, Quantizer(kind, groups=groups)))
    low, high = (
        (0, 2**codes.bits - 1) if codes.offsets is not None else (-(2 ** (codes.bits - 1)), 2 ** (codes.bits - 1))
    )
    assert codes.codes.min() >= low
    assert codes.codes.max() <= high
    if bits >= 3:  # half a step, or a whole one where the largest is cut
        bound = codes.scales.max() * 1.001 + torch.finfo(dtype).eps * 100
        assert (found.float() - x.float()).abs().max() <= bound


def test_gradients_are_copied_once_and_twice():
    x = torch.tensor([0.3, -1.2, 2.0], requires_grad=True)
    factor = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (grad,) = torch.autograd.grad((fake_quantize(x, 4, SYMMETRIC) * factor).sum(), x, create_graph=True)
    assert torch.equal(grad, factor)
    assert torch.equal(torch.autograd.grad(grad.sum(), factor)[0], torch.ones(3))


def test_stochastic_rounding_is_a_function_of_its_key():
    x = torch.linspace(-1, 1, 4096)
    how = Quantizer(rounding="stochastic")
    first, second, other = (fake_quantize(x, 4, how, key) for key in (7, 7, 8))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    step = 2 / 16
    assert (first - x).abs()[:-600].max() <= step * 1.001  # the last ones are beyond the greatest code
    # 3496 errors, uniform within a step: a mean beyond 6 standard deviations of the mean would be a bias
    assert (first - x)[:-600].mean().abs() < 6 * step / 2 / 3496**0.5
    assert torch.equal(fake_quantize(x, 4, how), fake_quantize(x, 4, SYMMETRIC))


@pytest.mark.parametrize(
    ("bits", "quantizer", "said"),
    [
        (2, ASYMMETRIC, "2 bits, asymmetric"),
        (1, Quantizer(rounding="stochastic"), "1 bits, symmetric and stochastic"),
        (17, SYMMETRIC, "17 bits; use 1 to 16"),
        (8, Quantizer(groups=3), "10 elements of shape (10,) are not divisible into 3"),
    ],
)
def test_what_cannot_be_is_said(bits, quantizer, said):
    with pytest.raises(UsageError) as found:
        fake_quantize(torch.ones(10), bits, quantizer)
    assert said in str(found.value)
