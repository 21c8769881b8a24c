"""1-bit optimizers as objects for `initialize(optimizer=...)`; they train as the JSON types of their names do.

The names and parameters are those of DeepSpeed's classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.log import once
from mpispeed.base.unused_params import find_ineffective
from mpispeed.optim.rule import RULES, Rule

log = logging.getLogger(__name__)

_DEFAULT_HINTS = {"bias_correction": True, "comm_backend_name": "nccl"}


class OneBitOptimizer(torch.optim.Optimizer):
    """Base of the classes below: groups with hyper-parameters, and the rule that an engine updates them by.

    The object has no update of its own, which needs the other ranks: give it to `mpispeed.initialize`. Parameters that
    hold for the whole optimizer, such as `freeze_step`, cannot be set for a group.
    """

    type_name = ""

    def __init__(self, params: Iterable[Any], given: Mapping[str, Any], max_grad_norm: float) -> None:
        """Args: `given` are the parameters under their names in a JSON file.

        Raises:
            UnsupportedOption: amsgrad is true.
            ConfigError: a value is impossible, or `max_grad_norm` is not 0.
        """
        if max_grad_norm:
            msg = (
                f"max_grad_norm of {type(self).__name__} is {max_grad_norm!r}; clipping is set by the key "
                '"gradient_clipping" of the config, move it there'
            )
            raise ConfigError(msg)
        self._rule, defaults = RULES[self.type_name](dict(given))
        hints = {key: value for key, value in given.items() if _DEFAULT_HINTS.get(key) != value}
        for key, why in find_ineffective(hints).items():
            once(log, logging.WARNING, f"{key} of {type(self).__name__} has no effect: {why}")
        super().__init__(params, defaults)

    @property
    def rule(self) -> Rule:
        """The update rule; the groups have the hyper-parameters that it reads."""
        return self._rule

    def step(self, closure: Any = None) -> Any:
        """Refuse an update without an engine.

        Raises:
            UsageError: always; an engine that has the object replaces this method.
        """
        del closure
        msg = (
            f"{type(self).__name__}.step() needs the other ranks: give the optimizer to "
            "mpispeed.initialize(optimizer=...) and call engine.step()"
        )
        raise UsageError(msg)


class OnebitAdam(OneBitOptimizer):
    """1-bit Adam, as "type": "OneBitAdam". See `docs/guides/onebit.md`.

    `deepspeed`, `bias_correction`, `eps_inside_sqrt`, `cuda_aware` and `comm_backend_name` are accepted and have no
    effect: the exchange is the engine's, over MPI.
    """

    type_name = "OneBitAdam"

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        del deepspeed
        given = {"lr": lr, "freeze_step": freeze_step, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        hints = _hints(bias_correction, eps_inside_sqrt, amsgrad, cuda_aware, comm_backend_name)
        super().__init__(params, {**given, **hints}, max_grad_norm)


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam, as "type": "ZeroOneAdam"; parameters without effect as in `OnebitAdam`."""

    type_name = "ZeroOneAdam"

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        del deepspeed
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "var_freeze_step": var_freeze_step,
            "var_update_scaler": var_update_scaler,
            "local_step_scaler": local_step_scaler,
            "local_step_clipper": local_step_clipper,
        }
        hints = _hints(bias_correction, eps_inside_sqrt, amsgrad, cuda_aware, comm_backend_name)
        super().__init__(params, {**given, **hints}, max_grad_norm)


class OnebitLamb(OneBitOptimizer):
    """1-bit LAMB, as "type": "OneBitLamb"; parameters without effect as in `OnebitAdam`."""

    type_name = "OneBitLamb"

    def __init__(
        self,
        params: Iterable[Any],
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        del deepspeed
        given = {
            "lr": lr,
            "freeze_step": freeze_step,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        hints = _hints(bias_correction, eps_inside_sqrt, amsgrad, cuda_aware, comm_backend_name)
        super().__init__(params, {**given, **hints}, max_grad_norm)


def _hints(
    bias_correction: bool, eps_inside_sqrt: bool, amsgrad: bool, cuda_aware: bool, comm_backend_name: str
) -> dict[str, Any]:
    return {
        "bias_correction": bias_correction,
        "eps_inside_sqrt": eps_inside_sqrt,
        "amsgrad": amsgrad,
        "cuda_aware": cuda_aware,
        "comm_backend_name": comm_backend_name,
    }
