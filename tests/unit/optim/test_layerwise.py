"""LAMB over parts of parameters: two halves, and sums in between, come to what it does with whole ones."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpispeed.native.cuda import launcher
from mpispeed.optim.lamb import Lamb
from mpispeed.optim.rule import Layerwise, Window
from tests.helpers.cuda_host import HostLauncher

SIZES = (1, 700, 16_500, 3)
HYPER = {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 3.0}


def make(dtype=torch.float32):
    """Master, gradient, states and copy of every parameter; one parameter is zero, as biases are in the beginning."""
    source = torch.Generator().manual_seed(3)
    made = []
    for number, size in enumerate(SIZES):
        state = {name: torch.rand(size, generator=source) * 0.1 for name in ("exp_avg", "exp_avg_sq")}
        master, grad = (torch.randn(size, generator=source) for _ in range(2))
        made.append((master * (number != 3), grad.to(dtype), state, torch.empty(size, dtype=torch.bfloat16)))
    return made


def window(one, entry, first, stop, *, has_out=True):
    master, grad, state, out = one
    part = slice(first, stop)
    return Window(
        master[part],
        grad[part],
        {name: value[part] for name, value in state.items()},
        {},
        step=4,
        out=out[part] if has_out else None,
        entry=entry,
    )


def by_halves(made, parts):
    """Update over parts, dealt to ranks: lists of (entry, first, stop)."""
    rules = [Lamb(**HYPER) for _ in parts]
    sums = []
    for rule, own in zip(rules, parts, strict=True):
        windows = (window(made[entry], entry, first, stop, has_out=False) for entry, first, stop in own)
        sums.append(rule.first_half(windows, len(SIZES), grad_scale=0.5, threads=1))
    for rule, own in zip(rules, parts, strict=True):
        windows = (window(made[entry], entry, first, stop) for entry, first, stop in own)
        rule.second_half(windows, torch.stack(sums).sum(0), grad_scale=0.5, threads=1)
    return rules


def check(made, whole):
    for one, other in zip(made, whole, strict=True):
        for name in one[2]:
            assert torch.equal(one[2][name], other[2][name])  # elementwise
        torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=1e-8)  # sums of fp64 in another order
        assert torch.equal(one[3], one[0].bfloat16())


@pytest.fixture(params=["loops", "kernels"])
def way(request):
    """Compiled loops, or the kernels of a device, which here run on the host."""
    with launcher.standing_in(HostLauncher()) if request.param == "kernels" else nullcontext():
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_four_ranks(way, dtype):
    made, whole = make(dtype), make(dtype)
    rule = Lamb(**HYPER)
    assert isinstance(rule, Layerwise)
    rule.update([window(one, None, 0, None) for one in whole], grad_scale=0.5)
    parts = [
        [(0, 0, 1), (1, 0, 1)],
        [(1, 1, 650), (1, 650, 650)],  # one of them empty
        [(1, 650, 700), (2, 0, 9_000)],
        [(2, 9_000, 12_345), (2, 12_345, 16_500), (3, 0, 3)],
    ]
    rules = by_halves(made, parts)
    check(made, whole)
    ratios = rule.get_lamb_coeffs()
    for own, found in zip(parts, rules, strict=True):
        entries = dict.fromkeys(entry for entry, first, stop in own if stop > first)
        assert found.get_lamb_coeffs() == pytest.approx([ratios[entry] for entry in entries], rel=1e-12)
    assert ratios[3] == 1.0


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut(data):
    made, whole = make(), make()
    Lamb(**HYPER).update([window(one, None, 0, None) for one in whole], grad_scale=0.5)
    parts = [[], [], []]
    for entry, size in enumerate(SIZES):
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
        for first, stop in zip([0, *cuts], [*cuts, size], strict=True):
            parts[data.draw(st.integers(0, 2))].append((entry, first, stop))
    by_halves(made, parts)
    check(made, whole)
