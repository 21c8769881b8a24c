"""Parameters of the optimizers with compiled loops, as a JSON file gives them."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load, require_available
from mpispeed.config.optimizer import HOST_PARAMS
from mpispeed.optim import build

GOOD = {
    "Adagrad": {"lr": 0.1, "eps": 1e-10, "lr_decay": 0.1, "initial_accumulator_value": 1, "fused": None},
    "Lion": {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "LAMB": {"lr": 0.1, "betas": [0.9, 0.99], "max_coeff": 10, "min_coeff": 0.1, "eps_inside_sqrt": True},
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_accepted_can_be_built(kind):
    section = {"type": kind, "params": GOOD[kind]}
    require_available(load({"optimizer": section}).config)
    rule, _ = build(kind, section["params"])
    for key in HOST_PARAMS[kind.lower()]:
        accepted = {"amsgrad": False}.get(key, "auto")
        build(kind, {key: accepted})
    assert set(rule.defaults) <= set(HOST_PARAMS[kind.lower()])


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("Lion", {"eps": 1e-8}, "optimizer.params.eps: unknown keyword"),
        ("lion", {"beta": [0.9, 0.99]}, 'did you mean "betas"'),
        ("Lamb", {"max_coeff": -1}, "optimizer.params.max_coeff: expected"),
        ("Lamb", {"amsgrad": True}, "Lamb has no amsgrad"),
        ("Adagrad", {"lr": "fast"}, "optimizer.params.lr: expected"),
        ("Adagrad", {"maximize": 1}, "optimizer.params.maximize: expected"),
    ],
)
def test_what_is_wrong_is_said(kind, params, said):
    with pytest.raises(ConfigError) as caught:
        load({"optimizer": {"type": kind, "params": params}})
    assert said in str(caught.value)
