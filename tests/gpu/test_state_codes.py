"""States in 8 and 16 bits on a GPU are the bytes of the host loops."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import state_codes as sc
from tests.helpers.codes import plain, same, shifted, tiny, untouched, wild

LENGTHS = [1, 255, 257, 5000, 1_000_003]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_host(device, signed, seed):
    for i, count in enumerate(LENGTHS):
        for make in (plain, tiny, wild):
            x = make(count) if signed else make(count).abs()
            how = {"signed": signed, "seed": seed, "step": 3, "start": (0, 2**36, 77)[i % 3]}
            host = torch.empty(count, dtype=torch.uint8), torch.empty(sc.scale_count(count))
            ours = [shifted(torch.full_like(y, 85), i % 2, device) for y in host]
            sc.encode8(*host, x, **how)
            sc.encode8(*ours, shifted(x, i % 2, device), **how)
            assert torch.equal(ours[0].cpu(), host[0])
            assert same(ours[1], host[1])
            wanted, out = torch.empty(count), shifted(torch.zeros(count), i % 3, device)
            sc.decode8(wanted, *host, signed=signed)
            sc.decode8(out, *ours, signed=signed)
            assert same(out, wanted)
            assert all(untouched(y, k) for y, k in ((ours[0], i % 2), (ours[1], i % 2), (out, i % 3)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_those_of_the_host(device, dtype):
    for i, count in enumerate(LENGTHS):
        for make in (plain, tiny, wild):
            x, how = make(count), {"seed": -1, "step": 2**35, "start": (0, 5, 2**37 + 99)[i % 3]}
            host = [torch.empty(count, dtype=dtype) for _ in range(3)]
            ours = [shifted(torch.zeros(count, dtype=dtype), i % 2, device) for _ in range(3)]
            wanted, out = torch.empty(count), shifted(torch.zeros(count), i % 2, device)
            for to, high, low, joined, values in ((*host, wanted, x), (*ours, out, shifted(x, i % 2, device))):
                sc.round_stochastic(to, values, **how)
                sc.split(high, low, values)
                sc.join(joined, high, low)
            assert all(same(a, b) for a, b in zip((*ours, out), (*host, wanted), strict=True))
            assert all(untouched(y, i % 2) for y in (*ours, out))
