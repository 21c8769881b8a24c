"""Packed codes: every width comes back, in exactly so many bytes, and as the matrices that compiled products read."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from mpispeed.native import packed_codes, weight_codes
from mpispeed.native.packed_codes import pack


def drawn(bits, is_signed, numel, seed=0):
    torch.manual_seed(seed)
    if not is_signed:
        return torch.randint(0, 1 << bits, (numel,))
    half = 1 << (bits - 1)
    return torch.randint(0, 2, (numel,)) * 2 - 1 if bits == 1 else torch.randint(-half, half, (numel,))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.booleans(), st.integers(1, 40), st.integers(1, 7), st.integers(8, 64), st.integers(0, 99))
def test_any_width_comes_back(bits, is_signed, length, groups, span, seed):
    codes = drawn(bits, is_signed, length * groups, seed)
    scales, offsets = torch.rand(groups), None if is_signed else torch.randn(groups)
    old, packed_codes._SPAN = packed_codes._SPAN, span // 8 * 8
    try:
        packed = pack(codes, bits, scales, offsets, is_signed=is_signed)
        wanted = codes.view(groups, length).float() * scales[:, None]
        wanted = wanted if offsets is None else wanted + offsets[:, None]
        assert packed.codes.nbytes == -(-length * groups * bits // 8)
        assert packed.nbytes == packed.codes.nbytes + 4 * groups * (1 if is_signed else 2)
        assert torch.equal(packed.integers().long(), codes)
        assert torch.equal(packed.values(), wanted.view(-1))
        assert torch.equal(packed.values(torch.bfloat16), wanted.view(-1).bfloat16())
    finally:
        packed_codes._SPAN = old


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("groups", [1, 3, 12])
def test_products_read_the_same_codes(bits, groups):
    packed = pack(drawn(bits, True, 12 * 32).view(12, 32), bits, torch.rand(groups) + 0.5)
    matrix = packed.as_matrix()
    assert matrix.codes.data_ptr() == packed.codes.data_ptr()
    out = torch.empty(12, 32)
    weight_codes.dequantize(out, matrix)
    assert torch.equal(out, packed.values())


def test_other_codes_are_no_matrix():
    assert pack(drawn(5, True, 64).view(8, 8), 5, torch.ones(1)).as_matrix() is None
    assert pack(drawn(8, False, 64).view(8, 8), 8, torch.ones(1), torch.ones(1), is_signed=False).as_matrix() is None
    assert pack(drawn(4, True, 40).view(8, 5), 4, torch.ones(1)).as_matrix() is None
    assert pack(drawn(8, True, 64).view(8, 8), 8, torch.ones(16)).as_matrix() is None


class Largest(TorchDispatchMode):
    """The most elements that one operation makes, but for empty tensors to fill."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and "empty" not in str(func) and "view" not in str(func):
            self.most = max(self.most, made.numel())
        return made


def test_temporaries_stay_small(monkeypatch):
    monkeypatch.setattr(packed_codes, "_SPAN", 64)
    packed = pack(drawn(3, False, 4096), 3, torch.ones(1), torch.ones(1), is_signed=False)
    with Largest() as seen:
        packed.values()
    assert seen.most <= 3 * 64  # bits of a code times elements, before they are joined


def test_codes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"from 0 to 4; 2 bits hold -2 to 1"):
        pack(torch.arange(5), 2, torch.ones(1))
    with pytest.raises(ValueError, match=r"-1 and 1"):
        pack(torch.tensor([1, 0]), 1, torch.ones(1))
    with pytest.raises(ValueError, match="no groups"):
        pack(torch.zeros(10), 4, torch.ones(3))


def test_read_codes_are_checked():
    packed = pack(drawn(3, True, 24), 3, torch.ones(2))
    assert packed.check() == ""
    assert "needs 9 bytes" in packed._replace(codes=packed.codes[:-1]).check()
    assert "1 to 8" in packed._replace(bits=9).check()
    assert "no groups" in packed._replace(scales=torch.ones(5)).check()
    assert "of one shape" in packed._replace(offsets=torch.ones(1)).check()
