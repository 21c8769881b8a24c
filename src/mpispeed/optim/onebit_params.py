"""Params of 1-bit optimizers in a JSON file: those shared with Adam, and their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpispeed.base.errors import ConfigError
from mpispeed.native.flat import Terms
from mpispeed.optim.adam import adam_terms
from mpispeed.optim.host_rule import check_factors, decay_mode, read_hyper
from mpispeed.optim.rule import drop_auto

DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
BACKENDS = ("nccl", "mpi", "compressed", "hccl")
"""Values of comm_backend_name. A hint: the one-bit mean always runs over MPI."""

# Accepted as in DeepSpeed, whose 1-bit optimizers do not look at them either.
_TRUTHS = ("bias_correction", "eps_inside_sqrt", "cuda_aware")
_IGNORED = ("set_grad_none", "fp32_optimizer_states", "comm_backend_name", *_TRUTHS)


def read_onebit(
    name: str, params: Mapping[str, Any], defaults: Mapping[str, Any], counts: Iterable[str]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Hyper-parameters that groups may set, and those among `counts`, which hold for the whole optimizer.

    Raises:
        UnknownOption: a parameter that this optimizer does not take.
        UnsupportedOption: amsgrad is true.
        ConfigError: a value is impossible.
    """
    params = drop_auto(params)
    for key in _TRUTHS:
        if not isinstance(params.get(key, False), bool):
            msg = f"{key} of the optimizer {name} is {params[key]!r}; expected true or false"
            raise ConfigError(msg)
    backend = params.get("comm_backend_name", BACKENDS[0])
    if backend not in BACKENDS:
        msg = f"comm_backend_name of the optimizer {name} is {backend!r}; expected one of {', '.join(BACKENDS)}"
        raise ConfigError(msg)
    found = {key: check_count(name, key, params.pop(key)) for key in counts if key in params}
    return read_hyper(name, params, defaults, (*_IGNORED, *counts)), found


def onebit_terms(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    rate_sum: float = 1.0,
) -> Terms:
    """Factors of the updates with a variance that stays as it is; `rate_sum` is the divisor of "zero_one_settle".

    Raises:
        ValueError: betas are out of range.
    """
    beta1, beta2 = check_factors("onebit", betas, 1)
    lr, weight_decay = float(lr), float(weight_decay)
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr,
        root_scale=float(rate_sum),
        eps=float(eps),
        decay=lr * weight_decay,
        decay_mode=decay_mode(weight_decay, decoupled=True),
        grad_scale=float(grad_scale),
    )


def warm_terms(hyper: Mapping[str, Any], step: int, grad_scale: float) -> Terms:
    """The factors of an update of Adam without bias correction, with the decay inside of the step."""
    own = {name: hyper[name] for name in DEFAULTS}
    return adam_terms(step=step, decoupled=True, bias_correction=False, grad_scale=grad_scale, **own)


def check_count(owner: str, key: str, value: Any) -> int:
    """`value` as an integer of at least 1.

    Raises:
        ConfigError: it is something else.
    """
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not is_whole or value < 1:
        msg = f"{key} of the optimizer {owner} is {value!r}; expected a whole number of at least 1"
        raise ConfigError(msg)
    return int(value)
