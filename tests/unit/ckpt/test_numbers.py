"""Numpy's reading of stored elements against torch's."""

import numpy as np
import pytest
import torch

from mpispeed.ckpt.format.numbers import as_numbers


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu],
)
def test_all_float8_codes(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).float().numpy()
    got = as_numbers(codes.numpy(), str(dtype).removeprefix("torch."))
    assert got.dtype == np.float32
    assert np.array_equal(got, expected, equal_nan=True)


def test_all_bfloat16_codes():
    codes = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(as_numbers(codes, "bfloat16"), expected, equal_nan=True)
