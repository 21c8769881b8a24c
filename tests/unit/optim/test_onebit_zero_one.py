"""0/1 Adam against the reference with n workers: coded gradients, local steps and meetings."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpispeed.base.errors import UsageError
from mpispeed.optim.choice import build
from mpispeed.optim.exchange import Exchange
from mpispeed.optim.rule import Window
from mpispeed.optim.zero_one_adam import ZeroOneAdam
from tests.helpers.onebit_reference import OneBitMean, ZeroOne
from tests.zoo.compare import check_near

LENGTH, STEPS = 45, 30
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
# fp32 against fp64: per step a rounding of a parameter below 8 (4.8e-7) and 1e-6 of a step of at most 0.1.
BOUND = {"rtol": 1e-5, "atol": 2e-5}
COUNTS = [
    {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2},
    {"var_freeze_step": 12, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4},
    {"var_freeze_step": 1, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 3},
]


def gradients(workers: int) -> list[list[np.ndarray]]:
    """For every step one gradient per worker; element 3 has none while the variance is updated, 4 never."""
    source = np.random.default_rng(workers)
    steps = []
    for step in range(1, STEPS + 1):
        grads = [source.normal(size=LENGTH) for _ in range(workers)]
        for grad in grads:
            grad[4 if step > 12 else 3 : 5] = 0.0
        steps.append(grads)
    return steps


def start() -> np.ndarray:
    return np.random.default_rng(7).normal(size=LENGTH)


def fp32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).float()


class Worker:
    """A rule with master, states and the local parameter."""

    def __init__(self, hyper: dict[str, Any], out_dtype: torch.dtype = torch.float32) -> None:
        rule, self.group = build("ZeroOneAdam", hyper)
        assert isinstance(rule, ZeroOneAdam)
        self.rule = rule
        self.master = fp32(start())
        self.state = {name: torch.zeros(LENGTH) for name in rule.state_names}
        self.out = torch.empty(LENGTH, dtype=out_dtype)

    def windows(self, step: int, grad: Tensor) -> list[Window]:
        parts = [slice(0, 20), slice(20, 20), slice(20, LENGTH)]
        return [
            Window(
                self.master[part], grad[part], {name: x[part] for name, x in self.state.items()}, self.group, step,
                self.out[part], (0, 0, part.start),
            )
            for part in parts
        ]  # fmt: skip


def step_of(worker: Worker, step: int, grad: np.ndarray, mean: OneBitMean, index: int) -> None:
    """One step of one worker after that of the reference, whose agreed values it takes."""
    kind = worker.rule.exchanges(step)
    windows = worker.windows(step, fp32(2 * (mean.last if kind is Exchange.CODED_GRADIENT else grad)))
    common = worker.master.clone()
    worker.rule.update(windows, grad_scale=0.5)
    if kind in (Exchange.NOTHING, Exchange.DRIFT):
        assert torch.equal(worker.master, common)
    if kind is Exchange.DRIFT:
        buffer = torch.empty(LENGTH)
        for window, part in zip(windows, (slice(0, 20), slice(20, 20), slice(20, LENGTH)), strict=True):
            worker.rule.drift(window, buffer[part])
        check_near(buffer, mean.inputs[index], **BOUND)
        for window, part in zip(windows, (slice(0, 20), slice(20, 20), slice(20, LENGTH)), strict=True):
            worker.rule.settle(window, fp32(mean.last)[part])
        assert torch.equal(worker.out, worker.master.to(worker.out.dtype))
        assert (worker.state["momentum_accumulator"] == 0).all()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("counts", COUNTS)
def test_it_is_that_of_the_reference(counts: dict[str, int], workers: int) -> None:
    mean = OneBitMean(workers, LENGTH)
    reference = ZeroOne(start(), mean, workers, **counts, **HYPER)
    team = [Worker({**HYPER, **counts}) for _ in range(workers)]
    seen = set()
    for step, grads in enumerate(gradients(workers), start=1):
        reference.step(grads)
        kind = team[0].rule.exchanges(step)
        seen.add(kind)
        for index, worker in enumerate(team):
            grad = np.mean(grads, axis=0) if kind is Exchange.GRADIENT else grads[index]
            step_of(worker, step, grad, mean, index)
            check_near(worker.out, reference.p[index], **BOUND)
            check_near(worker.state["exp_avg"], reference.m[index], **BOUND)
            check_near(worker.state["exp_avg_sq"], reference.v, **BOUND)
            check_near(worker.state["momentum_accumulator"], reference.u[index], **BOUND)
        if kind is not Exchange.NOTHING:
            assert all(torch.equal(worker.master, team[0].master) for worker in team)
            assert all(torch.equal(worker.out, team[0].out) for worker in team)
    assert len(seen) >= 3
    assert (team[0].state["exp_avg"][4] == 0).all()


def test_scalars_go_on_where_they_were() -> None:
    counts = {**COUNTS[1], "var_freeze_step": 3}
    mean = OneBitMean(1, LENGTH)
    reference = ZeroOne(start(), mean, 1, **counts, **HYPER)
    worker = Worker({**HYPER, **counts}, torch.bfloat16)
    for step, grads in enumerate(gradients(1), start=1):
        reference.step(grads)
        step_of(worker, step, grads[0], mean, 0)
        again = Worker({**HYPER, **counts}, torch.bfloat16)
        again.rule.load_scalars(copy.deepcopy(worker.rule.scalars()))
        again.master, again.state, again.out = worker.master, worker.state, worker.out
        worker = again
        check_near(worker.state["exp_avg"], reference.m[0], **BOUND)
    rates = worker.rule.scalars()["rates"]
    assert set(rates) == {"0"}
    assert rates["0"]["step"] == STEPS


def test_rates_are_summed_by_group_and_begin_anew_after_a_meeting() -> None:
    rule = ZeroOneAdam(var_freeze_step=1, local_step_scaler=1, local_step_clipper=4)
    states = [{name: torch.zeros(8) for name in rule.state_names} for _ in range(3)]
    meetings = []
    for step in range(1, 14):
        windows = []
        for index, state in enumerate(states):
            group = {"lr": 0.1 * step * (index // 2 + 1)}  # windows 0 and 1 are of one group
            out = torch.empty(8)
            windows.append(Window(torch.zeros(8), torch.ones(8), state, group, step, out, (0, index // 2, index)))
        rule.update(windows)
        if rule.exchanges(step) is Exchange.DRIFT:
            meetings.append(step)
            for window in windows:
                rule.settle(window, torch.zeros(8))
        sums = {group: row["sum"] for group, row in rule.scalars()["rates"].items()}
        since = [t for t in range(2, step + 1) if not any(t <= meeting for meeting in meetings)]
        assert sums == ({} if step == 1 else pytest.approx({"0": 0.1 * sum(since), "1": 0.2 * sum(since)}))
    assert meetings == [2, 4, 8, 12]


def test_a_learning_rate_of_zero_leaves_numbers() -> None:
    rule = ZeroOneAdam(lr=0.0, var_freeze_step=1, local_step_clipper=1)
    state = {name: torch.zeros(8) for name in rule.state_names}
    master, out = torch.ones(8), torch.empty(8)
    for step in (1, 2):
        window = Window(master, torch.ones(8), state, {}, step, out)
        rule.update([window])
    rule.settle(window, torch.zeros(8))
    assert torch.equal(out, torch.ones(8))
    assert (state["exp_avg"] == 0).all()


def test_what_is_missing_is_said() -> None:
    rule = ZeroOneAdam(var_freeze_step=1)
    state = {name: torch.zeros(8) for name in rule.state_names}
    window = Window(torch.ones(8), torch.ones(8), state, {}, 2, None, (3, 0, 0))
    with pytest.raises(UsageError, match=r"window \(3, 0, 0\) has no out at the local step 2"):
        rule.update([window])
    with pytest.raises(UsageError, match="meets at step 2, but the last local update of its group was 0"):
        rule.settle(window, torch.zeros(8))


def test_fp64_is_updated_in_fp64() -> None:
    counts, mean = COUNTS[0], OneBitMean(1, LENGTH)
    reference = ZeroOne(start(), mean, 1, **counts, **HYPER)
    rule, group = build("ZeroOneAdam", {**HYPER, **counts})
    assert isinstance(rule, ZeroOneAdam)
    master, out = torch.from_numpy(start()), torch.empty(LENGTH, dtype=torch.float64)
    state = {name: torch.zeros(LENGTH, dtype=torch.float64) for name in rule.state_names}
    for step, grads in enumerate(gradients(1), start=1):
        reference.step(grads)
        kind = rule.exchanges(step)
        grad = torch.from_numpy(mean.last if kind is Exchange.CODED_GRADIENT else grads[0])
        window = Window(master, grad, state, group, step, out)
        rule.update([window])
        if kind is Exchange.DRIFT:
            rule.settle(window, torch.from_numpy(mean.last))
        torch.testing.assert_close(out, torch.from_numpy(reference.p[0]), rtol=1e-12, atol=1e-12)
