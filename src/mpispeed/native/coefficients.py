"""Factors of one update of Adam, its 1-bit variants, Adagrad, Lion and LAMB, from hyper-parameters and the step number.

They are computed in double for every update; the compiled loops and the torch references round them to the
working dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

DECAY_NONE, DECAY_DECOUPLED, DECAY_L2 = 0, 1, 2


class Terms(NamedTuple):
    """The factors of one update, in the order of the compiled table. Factors that a rule does not use keep defaults.

    `decay` is lr * weight_decay where the decay is decoupled (LAMB: weight_decay), and weight_decay for L2.
    """

    beta1: float = 0.0
    beta2: float = 0.0
    step_size: float = 0.0
    root_scale: float = 1.0
    eps: float = 0.0
    decay: float = 0.0
    decay_mode: int = DECAY_NONE
    grad_scale: float = 1.0
    is_eps_inside: bool = False
    least: float = 0.0
    most: float = math.inf


def _check(rule: str, betas: tuple[float, float] | None, step: int) -> tuple[float, float]:
    beta1, beta2 = (0.0, 0.0) if betas is None else (float(betas[0]), float(betas[1]))
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        msg = f"{rule}: betas are {(beta1, beta2)}; both must be at least 0 and below 1"
        raise ValueError(msg)
    if step < 1:
        msg = f"{rule}: step is {step}; it counts updates from 1"
        raise ValueError(msg)
    return beta1, beta2


def _mode(weight_decay: float, decoupled: bool) -> int:
    return DECAY_NONE if weight_decay == 0.0 else DECAY_DECOUPLED if decoupled else DECAY_L2


def adam_terms(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Adam (Kingma and Ba 2015) or AdamW (Loshchilov and Hutter 2019).

    Raises:
        ValueError: betas or step are out of range.
    """
    beta1, beta2 = _check("adam", betas, step)
    lr, weight_decay = float(lr), float(weight_decay)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr / correction1,
        root_scale=1.0 / math.sqrt(correction2),
        eps=float(eps),
        decay=lr * weight_decay if decoupled else weight_decay,
        decay_mode=_mode(weight_decay, decoupled),
        grad_scale=float(grad_scale),
    )


def adagrad_terms(
    *,
    step: int,
    lr: float,
    eps: float,
    weight_decay: float,
    lr_decay: float = 0.0,
    decoupled: bool = False,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Adagrad (Duchi et al. 2011); the rate of update t is lr / (1 + (t - 1) lr_decay), as in torch.

    Raises:
        ValueError: step is out of range.
    """
    _check("adagrad", None, step)
    rate, weight_decay = float(lr) / (1.0 + (step - 1) * float(lr_decay)), float(weight_decay)
    return Terms(
        step_size=rate,
        eps=float(eps),
        decay=rate * weight_decay if decoupled else weight_decay,
        decay_mode=_mode(weight_decay, decoupled),
        grad_scale=float(grad_scale),
    )


def lion_terms(
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of Lion (Chen et al. 2023), which do not depend on the step.

    Raises:
        ValueError: betas are out of range.
    """
    beta1, beta2 = _check("lion", betas, 1)
    lr, weight_decay = float(lr), float(weight_decay)
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr,
        decay=lr * weight_decay if decoupled else weight_decay,
        decay_mode=_mode(weight_decay, decoupled),
        grad_scale=float(grad_scale),
    )


def lamb_terms(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    is_eps_inside: bool = False,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    grad_scale: float = 1.0,
) -> Terms:
    """Factors of LAMB (You et al. 2020); the correction of both moments is one factor, as in DeepSpeed.

    Raises:
        ValueError: betas or step are out of range, or the limits of the trust ratio are not in order.
    """
    beta1, beta2 = _check("lamb", betas, step)
    least, most = float(min_coeff), float(max_coeff)
    if not 0.0 <= least <= most:
        msg = f"lamb: min_coeff is {least} and max_coeff {most}; pass 0 <= min_coeff <= max_coeff"
        raise ValueError(msg)
    weight_decay = float(weight_decay)
    correction = math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step) if bias_correction else 1.0
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=float(lr) * correction,
        eps=float(eps),
        decay=weight_decay,
        decay_mode=_mode(weight_decay, decoupled),
        grad_scale=float(grad_scale),
        is_eps_inside=bool(is_eps_inside),
        least=least,
        most=most,
    )


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
    beta1, beta2 = _check("onebit", betas, 1)
    lr, weight_decay = float(lr), float(weight_decay)
    return Terms(
        beta1=beta1,
        beta2=beta2,
        step_size=lr,
        root_scale=float(rate_sum),
        eps=float(eps),
        decay=lr * weight_decay,
        decay_mode=_mode(weight_decay, True),
        grad_scale=float(grad_scale),
    )
