"""1-bit Adam against the reference with n workers, its params, and what it asks of its caller."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError, UnknownOption, UnsupportedOption
from mpispeed.optim.adam import Adam
from mpispeed.optim.choice import build
from mpispeed.optim.exchange import Exchange, Exchanges, MixesMomentum
from mpispeed.optim.onebit_adam import OnebitAdam
from mpispeed.optim.rule import Window
from tests.helpers.onebit_reference import Adam as Reference
from tests.helpers.onebit_reference import OneBitMean
from tests.zoo.compare import check_near

LENGTH, STEPS, FREEZE = 45, 24, 6
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
# fp32 against fp64: per step a rounding of a parameter below 4 (2.4e-7) and 1e-6 of a step of at most 0.1.
BOUND = {"rtol": 1e-5, "atol": 5e-6}


def gradients(workers: int, seed: int = 0) -> list[list[np.ndarray]]:
    """For every step one gradient per worker; the elements 3 and 4 have none in the warm-up, 3 has none ever."""
    source = np.random.default_rng(seed)
    steps = []
    for step in range(1, STEPS + 1):
        grads = [source.normal(size=LENGTH) for _ in range(workers)]
        for grad in grads:
            grad[3 : 4 if step > FREEZE else 5] = 0.0
        steps.append(grads)
    return steps


def start() -> np.ndarray:
    return np.random.default_rng(7).normal(size=LENGTH)


def fp32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).float()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_that_of_the_reference(workers: int, weight_decay: float) -> None:
    hyper = {**HYPER, "weight_decay": weight_decay}
    rule, group = build("OneBitAdam", {**hyper, "freeze_step": FREEZE})
    assert isinstance(rule, OnebitAdam)
    mean = OneBitMean(workers, LENGTH)
    reference = Reference(start(), mean, freeze_step=FREEZE, **hyper)
    master, state = fp32(start()), {name: torch.zeros(LENGTH) for name in rule.state_names}
    scale = 0.5  # gradients come twice as large
    for step, grads in enumerate(gradients(workers), start=1):
        before = state["exp_avg"].clone()
        reference.step(grads)
        grad = fp32(2 * np.mean(grads, axis=0))
        if rule.exchanges(step) is Exchange.MOMENTUM:
            a, b = rule.mix(group, scale)
            for mixed, one in zip(mean.inputs, grads, strict=True):
                check_near(a * before + b * fp32(2 * one), mixed, **BOUND)
            state["exp_avg"].copy_(fp32(mean.last / rule.coefficient(())))
            grad.fill_(torch.nan)  # not read
        out = torch.empty(LENGTH, dtype=torch.bfloat16)
        rule.update([Window(master, grad, state, group, step, out)], grad_scale=scale)
        check_near(master, reference.p, **BOUND)
        check_near(state["exp_avg"], reference.m, **BOUND)
        check_near(state["exp_avg_sq"], reference.v, **BOUND)
        assert torch.equal(out, master.bfloat16())


def test_what_had_no_gradient_in_the_warm_up_does_not_move() -> None:
    rule, group = build("OneBitAdam", {**HYPER, "weight_decay": 0.0, "freeze_step": 1})
    master, state = torch.ones(8), {name: torch.zeros(8) for name in rule.state_names}
    grad = torch.ones(8)
    grad[2] = 0.0
    rule.update([Window(master, grad, state, group, 1)])
    state["exp_avg"].fill_(0.5)
    rule.update([Window(master, torch.ones(8), state, group, 2)])
    assert master[2] == 1.0
    assert state["exp_avg"][2] == 0.0
    assert (state["exp_avg"] == 0.5).sum() == 7
    assert (master < 1.0).sum() == 7


def test_the_warm_up_is_adam_without_correction_bit_for_bit() -> None:
    rule, group = build("onebitadam", {**HYPER, "freeze_step": 3})
    plain = Adam(**{**HYPER, "bias_correction": False})
    results = []
    for each in (rule, plain):
        master, state = fp32(start()), {name: torch.zeros(LENGTH) for name in rule.state_names}
        for step, grads in enumerate(gradients(1)[:3], start=1):
            each.update([Window(master, fp32(grads[0]), state, group, step)])
        results.append([master, *state.values()])
    assert all(map(torch.equal, *results))


def test_a_group_that_is_not_frozen_stays_in_the_warm_up() -> None:
    rule, group = build("OneBitAdam", {**HYPER, "freeze_step": 1})
    assert isinstance(rule, Exchanges)
    assert isinstance(rule, MixesMomentum)
    free = {**group, "non_freeze": True}
    assert rule.exchanges(2, free) is Exchange.GRADIENT
    assert rule.exchanges(2, group) is rule.exchanges(2) is Exchange.MOMENTUM
    assert rule.exchanges(1) is Exchange.GRADIENT
    master, state = fp32(start()), {name: torch.zeros(LENGTH) for name in rule.state_names}
    for step in (1, 2, 3):
        before = state["exp_avg_sq"].clone()
        rule.update([Window(master, torch.ones(LENGTH), state, free, step)])
        assert (state["exp_avg_sq"] > before).all()


def test_cuts_do_not_show() -> None:
    rule, group = build("OneBitAdam", {**HYPER, "freeze_step": 1})
    results = []
    for cuts in ([0, LENGTH], [0, 1, 17, 17, LENGTH]):
        master, state = fp32(start()), {name: torch.zeros(LENGTH) for name in rule.state_names}
        for step, grads in enumerate(gradients(1)[:4], start=1):
            if step > 1:
                state["exp_avg"].copy_(fp32(grads[0]) * 0.1)
            parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
            rule.update(
                Window(master[x], fp32(grads[0])[x], {k: v[x] for k, v in state.items()}, group, step) for x in parts
            )
        results.append([master, *state.values()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_shared_params(kind: str) -> None:
    for backend in ("nccl", "mpi", "compressed", "hccl", "auto"):
        build(kind, {"comm_backend_name": backend})
    rule, group = build(
        kind,
        {"cuda_aware": True, "eps_inside_sqrt": True, "bias_correction": True, "amsgrad": False, "lr": "auto"},
    )
    assert not {"cuda_aware", "freeze_step", "comm_backend_name", "amsgrad"} & set(group)
    assert group == rule.defaults
    with pytest.raises(UnsupportedOption, match="amsgrad is true"):
        build(kind, {"amsgrad": True})
    with pytest.raises(
        ConfigError, match=r"comm_backend_name of the optimizer .* is 'gloo'; expected one of nccl, mpi"
    ):
        build(kind, {"comm_backend_name": "gloo"})
    with pytest.raises(ConfigError, match=r"cuda_aware of the optimizer .* is 1; expected true or false"):
        build(kind, {"cuda_aware": 1})
    with pytest.raises(ConfigError, match="gradient_clipping"):
        build(kind, {"max_grad_norm": 1.0})
    with pytest.raises(UnknownOption, match="betas"):
        build(kind, {"beta": (0.9, 0.99)})


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "ten", None])
def test_counts_are_checked(value: Any) -> None:
    for kind, key in (("OneBitAdam", "freeze_step"), ("OneBitLamb", "freeze_step"), ("ZeroOneAdam", "var_freeze_step")):
        with pytest.raises(ConfigError, match=f"{key} of the optimizer {kind} is .*whole number of at least 1"):
            build(kind, {key: value})
    assert OnebitAdam(freeze_step=400.0).freeze_step == 400  # type: ignore[arg-type]
