"""States in 8 and 16 bits: the kernels, run on the host, write the bytes of the host loops."""

from __future__ import annotations

import pytest
import torch

from mpispeed.native import state_codes as sc
from mpispeed.native import status
from mpispeed.native.cuda import launcher
from tests.helpers.codes import plain, same, shifted, tiny, untouched, wild
from tests.helpers.cuda_host import HostLauncher

LENGTHS = [1, 8, 255, 257, 2048, 9_001]
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["forward", "reversed"])
def kernels(request):
    return HostLauncher(is_reversed=request.param)


def empty(count, dtype, offset=0):
    return shifted(torch.full((count,), 85, dtype=dtype), offset)


def test_the_host_loops_are_there():
    assert status.compiled("state_codes") is not None


@pytest.mark.parametrize("seed", [None, -7])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_host(kernels, signed, seed):
    for i, count in enumerate(LENGTHS):
        for make in (plain, tiny, wild):
            x = make(count, seed=i) if signed else make(count, seed=i).abs()
            how = {"signed": signed, "seed": seed, "step": 2**40 + 1, "start": (0, 256, 2**36, 77)[i % 4]}
            host, ours = ((empty(count, torch.uint8, k), empty(sc.scale_count(count), torch.float32, k))
                          for k in (0, i % 2))  # fmt: skip
            sc.encode8(*host, x, **how)
            out, wanted = empty(count, torch.float32, i % 3), empty(count, torch.float32)
            sc.decode8(wanted, *host, signed=signed)
            before = len(kernels.launched)
            with launcher.standing_in(kernels):
                sc.encode8(*ours, shifted(x, i % 2), **how)
                sc.decode8(out, *ours, signed=signed)
            assert len(kernels.launched) == before + 2
            assert torch.equal(ours[0], host[0]), (count, make)
            assert same(ours[1], host[1])
            assert same(out, wanted)
            assert all(untouched(y, i % 2) for y in ours)
            assert untouched(out, i % 3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_those_of_the_host(kernels, dtype):
    for i, count in enumerate(LENGTHS):
        for make in (plain, tiny, wild, lambda n, seed: plain(n, seed=seed) * 2.0**-16):
            x, offset, how = (
                make(count, seed=i),
                i % 2,
                {"seed": 3, "step": 2**35, "start": (0, 5, 128, 2**37 + 99)[i % 4]},
            )
            host = [empty(count, dtype) for _ in range(3)]
            ours = [empty(count, dtype, offset) for _ in range(3)]
            wanted, out = empty(count, torch.float32), empty(count, torch.float32, offset)
            sc.round_stochastic(host[0], x, **how)
            sc.split(host[1], host[2], x)
            sc.join(wanted, host[1], host[2])
            before = len(kernels.launched)
            with launcher.standing_in(kernels):
                sc.round_stochastic(ours[0], shifted(x, offset), **how)
                sc.split(ours[1], ours[2], shifted(x, offset))
                sc.join(out, ours[1], ours[2])
            assert len(kernels.launched) == before + 3
            for a, b in zip((*ours, out), (*host, wanted), strict=True):
                assert same(a, b), (count, make)
            assert all(untouched(y, offset) for y in (*ours, out))


def test_plain_halves_on_a_device_are_those_of_torch():
    x, half, out = wild(999), empty(999, torch.float16), empty(999, torch.float32)
    with launcher.standing_in(HostLauncher()):
        sc.encode16(half, x)
        sc.decode16(out, half)
    assert same(half, x.half())
    assert same(out, half.float())
