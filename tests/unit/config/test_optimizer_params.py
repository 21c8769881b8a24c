"""Parameters of the optimizers with compiled loops, as a JSON file gives them."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load, require_available
from mpispeed.config.optimizer import OPTIMIZER_PARAMS
from mpispeed.optim.choice import build

GOOD = {
    "Adagrad": {"lr": 0.1, "eps": 1e-10, "lr_decay": 0.1, "initial_accumulator_value": 1, "fused": None},
    "Lion": {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "LAMB": {"lr": 0.1, "betas": [0.9, 0.99], "max_coeff": 10, "min_coeff": 0.1, "eps_inside_sqrt": True},
    "Muon": {
        "muon_lr": 0.02,
        "adam_lr": 1e-3,
        "ns_coefficients": [2, -1.5, 0.5],
        "ns_method": "gram",
        "betas": [0.8, 0.9],
    },
    "OneBitAdam": {"lr": 0.1, "freeze_step": 400, "comm_backend_name": "nccl", "cuda_aware": False},
    "ZeroOneAdam": {"var_freeze_step": 10, "var_update_scaler": 1, "local_step_scaler": 1, "local_step_clipper": 2},
    "onebitlamb": {"freeze_step": 4, "coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.4, "factor_threshold": 0.2},
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_accepted_can_be_built(kind):
    section = {"type": kind, "params": GOOD[kind]}
    require_available(load({"optimizer": section}).config)
    rule, _ = build(kind, section["params"])
    for key in OPTIMIZER_PARAMS[kind.lower()]:
        accepted = {"amsgrad": False}.get(key, "auto")
        build(kind, {key: accepted})
    assert set(rule.defaults) <= set(OPTIMIZER_PARAMS[kind.lower()])


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("Lion", {"eps": 1e-8}, "optimizer.params.eps: unknown keyword"),
        ("lion", {"beta": [0.9, 0.99]}, 'did you mean "betas"'),
        ("Lamb", {"max_coeff": -1}, "optimizer.params.max_coeff: expected"),
        ("Lamb", {"amsgrad": True}, "Lamb has no amsgrad"),
        ("OneBitAdam", {"freeze_step": 0}, "optimizer.params.freeze_step: expected a whole number from 1 to 2^53"),
        ("OneBitAdam", {"amsgrad": True}, "OneBitAdam has no amsgrad"),
        ("OneBitLamb", {"var_freeze_step": 4}, "optimizer.params.var_freeze_step: unknown keyword"),
        ("ZeroOneAdam", {"local_step_scaler": 1.5}, "optimizer.params.local_step_scaler: expected"),
        ("ZeroOneAdam", {"comm_backend_name": 3}, "optimizer.params.comm_backend_name: expected a text"),
        ("Muon", {"ns_dtype": "int8"}, "expected one of auto, fp32, bf16, fp16"),
        ("muon", {"momentum": 1}, "optimizer.params.momentum: expected a number from 0 to below 1"),
        ("Muon", {"ns_coefficients": [1, 2]}, "expected three numbers"),
        ("Muon", {"per_head_muon": True}, "heads are not made orthogonal"),
        ("Adagrad", {"lr": "fast"}, "optimizer.params.lr: expected"),
        ("Adagrad", {"maximize": 1}, "optimizer.params.maximize: expected"),
    ],
)
def test_what_is_wrong_is_said(kind, params, said):
    with pytest.raises(ConfigError) as caught:
        load({"optimizer": {"type": kind, "params": params}})
    assert said in str(caught.value)
