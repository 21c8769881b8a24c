"""1-bit LAMB against the reference with n workers, its coefficients and its numbers per parameter."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.optim.choice import build
from mpispeed.optim.exchange import Exchange, MixesMomentum
from mpispeed.optim.onebit_lamb import OnebitLamb
from mpispeed.optim.rule import Window
from tests.helpers.onebit_reference import Lamb, OneBitMean
from tests.zoo.compare import check_near

SIZES = (45, 7, 130)
STEPS, FREEZE = 24, 8
HYPER: dict[str, Any] = {
    "lr": 1e-2, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 5.0, "min_coeff": 0.05,
    "coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.4, "factor_threshold": 0.2,
}  # fmt: skip
# fp32 against fp64: per step a rounding of a parameter below 8 (4.8e-7) and 2e-6 of a step of at most 1; the
# implied gradient is a difference of momenta over 1 - beta1, so its rounding is ten times theirs.
BOUND = {"rtol": 2e-5, "atol": 2e-5}
KEYS = [(0, 0, 0), (0, 0, 45), (1, 0, 0)]


def gradients(workers: int) -> list[list[list[np.ndarray]]]:
    """For every step and worker one gradient per parameter, of very different sizes; one element has none at first."""
    source = np.random.default_rng(workers)
    steps = []
    for step in range(1, STEPS + 1):
        grads = [
            [source.normal(size=size) * factor for size, factor in zip(SIZES, (1.0, 30.0, 0.01), strict=True)]
            for _ in range(workers)
        ]
        for worker in grads:
            worker[0][3 : 4 if step > FREEZE else 5] = 0.0
        steps.append(grads)
    return steps


def starts() -> list[np.ndarray]:
    source = np.random.default_rng(7)
    return [source.normal(size=size) for size in SIZES]


def fp32(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).float()


class Model:
    """A rule with the masters and states of three parameters."""

    def __init__(self, hyper: dict[str, Any]) -> None:
        rule, self.group = build("OneBitLamb", hyper)
        assert isinstance(rule, OnebitLamb)
        self.rule = rule
        self.masters = [fp32(x) for x in starts()]
        self.states = [{name: torch.zeros(size) for name in rule.state_names} for size in SIZES]

    def step(self, step: int, grads: list[list[np.ndarray]], mean: OneBitMean, scale: float = 1.0) -> None:
        """One step after that of the reference, whose agreed momentum it takes."""
        given = [fp32(np.mean([worker[k] for worker in grads], axis=0) / scale) for k in range(len(SIZES))]
        if self.rule.exchanges(step) is Exchange.MOMENTUM:
            given = [state["exp_avg"].clone() for state in self.states]
            if self.rule.lacks_scaling(step, KEYS):
                norms = {
                    key: (float(m.double().norm()), m.numel()) for key, m in zip(KEYS, given, strict=True)
                }  # fmt: skip
                self.rule.prepare(norms)
            for k, agreed in enumerate(np.split(mean.last, np.cumsum(SIZES)[:-1])):
                a, b = self.rule.mix(self.group, scale, KEYS[k])
                mixed = np.split(mean.inputs[0], np.cumsum(SIZES)[:-1])[k]
                check_near(a * given[k] + b * fp32(grads[0][k] / scale), mixed, **BOUND)
                self.states[k]["exp_avg"].copy_(fp32(agreed) / self.rule.coefficient(KEYS[k]))
        rows = zip(self.masters, given, self.states, KEYS, strict=True)
        windows = [Window(p, g, state, self.group, step, None, key) for p, g, state, key in rows]
        self.rule.update(windows, grad_scale=scale)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_it_is_that_of_the_reference(workers: int, weight_decay: float) -> None:
    hyper = {**HYPER, "weight_decay": weight_decay}
    mean = OneBitMean(workers, sum(SIZES))
    reference = Lamb(starts(), mean, freeze_step=FREEZE, **hyper)
    model = Model({**hyper, "freeze_step": FREEZE})
    assert isinstance(model.rule, MixesMomentum)
    for step, grads in enumerate(gradients(workers), start=1):
        reference.step(grads)
        model.step(step, grads, mean, scale=0.5)
        for k, state in enumerate(model.states):
            check_near(model.masters[k], reference.p[k], **BOUND)
            check_near(state["exp_avg"], reference.m[k], **BOUND)
            check_near(state["exp_avg_sq"], reference.v[k], **BOUND)
            if step >= FREEZE:
                check_near(state["exp_avg_sq_fresh"], reference.fresh[k], **BOUND)
        assert model.rule.get_lamb_coeffs() == pytest.approx(reference.coefficients, rel=2e-5)
    scaling = [model.rule.coefficient(key) for key in KEYS]
    assert scaling == pytest.approx(reference.scaling, rel=1e-5)
    assert max(scaling) > 100 * min(scaling)
    assert any(0.4 < last != 1.0 for last in reference.last)


def test_scalars_go_on_where_they_were() -> None:
    mean = OneBitMean(2, sum(SIZES))
    reference = Lamb(starts(), mean, freeze_step=FREEZE, **HYPER)
    model = Model({**HYPER, "freeze_step": FREEZE})
    for step, grads in enumerate(gradients(2), start=1):
        reference.step(grads)
        model.step(step, grads, mean)
        saved = copy.deepcopy(model.rule.scalars())
        again = Model({**HYPER, "freeze_step": FREEZE})
        again.rule.load_scalars(saved)
        assert again.rule.scalars() == saved
        again.masters, again.states = model.masters, model.states
        model = again
    check_near(model.masters[2], reference.p[2], **BOUND)
    assert set(saved) == {"0/0/0", "0/0/45", "1/0/0"}
    assert set(saved["1/0/0"]) == {"lamb_coeff_freeze", "last_factor", "scaling_coeff"}


def test_a_warm_up_that_begins_again_forgets() -> None:
    rule = OnebitLamb(freeze_step=5)
    row = {"lamb_coeff_freeze": 3.0, "last_factor": 2.0, "scaling_coeff": 7.0}
    rule.load_scalars({"0/0/0": row, "1/0/0": {"lamb_coeff_freeze": 3.0, "last_factor": 1.0}})
    state = {name: torch.zeros(4) for name in rule.state_names}
    for unit in (0, 1):
        rule.update([Window(torch.ones(4), torch.zeros(4), state, {}, 3, None, (unit, 0, 0))])
    assert rule.scalars()["0/0/0"] == {"lamb_coeff_freeze": 0.0, "last_factor": 1.0}
    assert rule.scalars()["1/0/0"] == {"lamb_coeff_freeze": 3.0, "last_factor": 1.0}


def test_momenta_of_nothing_have_the_coefficient_one() -> None:
    rule = OnebitLamb(freeze_step=1)
    keys = [(0, 0, k) for k in range(4)]
    assert rule.lacks_scaling(2, keys)
    assert not rule.lacks_scaling(1, keys)
    rule.prepare({keys[0]: (2.0, 4), keys[1]: (0.0, 4), keys[2]: (1e-30, 4), keys[3]: (0.0, 0)})
    assert not rule.lacks_scaling(2, keys)
    assert [rule.coefficient(key) for key in keys] == pytest.approx([1 / 3, 1.0, 1.0, 1.0])
    rule = OnebitLamb(freeze_step=1)
    rule.prepare({keys[0]: (0.0, 4)})
    assert rule.coefficient(keys[0]) == 1.0
    rule.prepare({keys[0]: (2.0, 4)}, mean=3.0)  # of a model cut into stages
    assert rule.coefficient(keys[0]) == 3.0
    with pytest.raises(UsageError, match="call prepare"):
        rule.coefficient(keys[1])


def frozen_step(m: Tensor, v: Tensor, fresh: Tensor, previous: Tensor, **hyper: Any) -> tuple[OnebitLamb, Tensor]:
    rule = OnebitLamb(freeze_step=1, **hyper)
    rule.load_scalars({"0/0/0": {"lamb_coeff_freeze": 2.0, "last_factor": 1.0, "scaling_coeff": 1.0}})
    master = torch.ones(len(m))
    state = {"exp_avg": m, "exp_avg_sq": v, "exp_avg_sq_fresh": fresh}
    rule.update([Window(master, previous, state, {}, 2, None, (0, 0, 0))])
    return rule, master


def test_what_had_no_gradient_in_the_warm_up_does_not_move() -> None:
    for eps in (0.0, 1e-8):
        m, v = torch.full((6,), 0.5), torch.ones(6)
        v[2] = 0.0
        rule, master = frozen_step(m, v, v.clone(), torch.zeros(6), eps=eps)
        assert m[2] == 0.0
        assert master[2] == 1.0
        assert master.isfinite().all()
        assert math.isfinite(rule.get_lamb_coeffs()[0])


@pytest.mark.parametrize(("fresh", "factor"), [(1e-6, 1.1), (1e6, 0.9), (1.0, 1.0)])
def test_the_factor_is_kept_near_the_last_one(fresh: float, factor: float) -> None:
    m = torch.full((6,), 0.5)
    rule, _ = frozen_step(m, torch.ones(6), torch.full((6,), fresh), m / 0.9, betas=(0.9, 1 - 1e-9))
    assert rule.get_lamb_coeffs() == pytest.approx([2.0 * factor], rel=1e-6)


def test_spans_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.Generator().manual_seed(0)
    m, v, fresh, previous = (torch.rand(4096, generator=source) for _ in range(4))
    results = []
    for span in (1 << 18, 1024):
        monkeypatch.setattr("mpispeed.native.onebit_lamb.REFERENCE_SPAN", span)
        copies = [x.clone() for x in (m, v, fresh)]
        rule, master = frozen_step(*copies, previous, weight_decay=0.1, factor_threshold=0.9)
        results.append(([master, *copies], rule.get_lamb_coeffs()))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert results[0][1] == results[1][1]


def test_nan_reaches_the_parameter() -> None:
    m = torch.ones(6)
    m[1] = math.nan
    _, master = frozen_step(m, torch.ones(6), torch.ones(6), torch.ones(6))
    assert master.isnan().all()


def test_low_precision_copy_and_empty_windows() -> None:
    rule = OnebitLamb(freeze_step=1)
    rule.load_scalars({"0/0/0": {"lamb_coeff_freeze": 1.0, "last_factor": 1.0, "scaling_coeff": 1.0}})
    master, out = torch.ones(8), torch.empty(8, dtype=torch.float16)
    state = {name: torch.ones(8) for name in rule.state_names}
    empty = Window(master[:0], master[:0], {name: x[:0] for name, x in state.items()}, {}, 2, None, (0, 0, 8))
    rule.update([Window(master, torch.ones(8), state, {}, 2, out, (0, 0, 0)), empty])
    assert torch.equal(out, master.half())
    assert (out < 1).all()
    assert len(rule.get_lamb_coeffs()) == 1


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"coeff_beta": 1.0}, "coeff_beta of the optimizer OneBitLamb is 1.0"),
        ({"factor_threshold": 1.5}, "factor_threshold of the optimizer OneBitLamb is 1.5"),
        ({"factor_min": 3, "factor_max": 2}, "factor_min may not be above factor_max"),
        ({"min_coeff": 3, "max_coeff": 2}, "min_coeff may not be above max_coeff"),
    ],
)
def test_limits_are_checked(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build("OneBitLamb", params)
