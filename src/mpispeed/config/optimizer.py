"""Optimizer and learning-rate schedule, and the keywords the known ones take."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mpispeed.config.section import Section


class Optimizer(Section):
    """The update rule."""

    type: str | None = Field(
        None,
        description="Adam, AdamW, Adagrad, Lion, Lamb, Muon, SGD, MuAdam, MuAdamW, MuSGD, OneBitAdam, ZeroOneAdam, "
        "OneBitLamb, or a class name of torch.optim.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the optimizer.")
    legacy_fusion: bool = Field(False, description="Accepted for old files; no effect.")


class Scheduler(Section):
    """The learning rate as a function of the step."""

    type: str | None = Field(
        None,
        description="LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class name of "
        "torch.optim.lr_scheduler.",
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the schedule.")


# Kinds of values: see `keywords.KINDS`.
ADAM_PARAMS = {
    "lr": "rate",
    "betas": "betas",
    "eps": "non-negative",
    "weight_decay": "non-negative",
    "bias_correction": "bool",
    "amsgrad": "bool",
    "torch_adam": "bool",
    "adam_w_mode": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}
_OF_ADAM_AND_TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "torch_adam", "adam_w_mode")
TORCH_ADAM_PARAMS = {
    **{name: ADAM_PARAMS[name] for name in _OF_ADAM_AND_TORCH},
    **{name: "bool or null" for name in ("foreach", "maximize", "capturable", "differentiable", "fused")},
}
"""Keywords of torch's own classes, for torch_adam true."""
SGD_PARAMS = {
    "lr": "rate",
    "momentum": "non-negative",
    "dampening": "number",
    "weight_decay": "non-negative",
    "nesterov": "bool",
    "maximize": "bool",
    "foreach": "bool or null",
    "differentiable": "bool",
    "fused": "bool or null",
}
MU_ADAM_PARAMS = {
    **{name: ADAM_PARAMS[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")},
    **{name: TORCH_ADAM_PARAMS[name] for name in ("foreach", "capturable", "differentiable", "fused")},
    "maximize": "bool",
    "decoupled_wd": "bool",
}
"""Keywords of the package mup, which hands on those of torch."""
_OF_TORCH = ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
FLAT = {
    name.lower(): name
    for name in (
        "Adam",
        "AdamW",
        "Adagrad",
        "Lion",
        "Lamb",
        "Muon",
        "SGD",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        *_OF_TORCH,
    )
}
"""Optimizers whose states are flat pieces, as long as the masters, so that files can hold them."""

ADAGRAD_PARAMS = {
    "lr": "rate",
    "eps": "non-negative",
    "weight_decay": "non-negative",
    "lr_decay": "non-negative",
    "initial_accumulator_value": "non-negative",
    "maximize": "bool",
    "amsgrad": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
    "foreach": "bool or null",
    "differentiable": "bool",
    "fused": "bool or null",
}
LION_PARAMS = {
    "lr": "rate",
    "betas": "betas",
    "weight_decay": "non-negative",
    "amsgrad": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}
LAMB_PARAMS = {
    "lr": "rate",
    "betas": "betas",
    "eps": "non-negative",
    "weight_decay": "non-negative",
    "bias_correction": "bool",
    "eps_inside_sqrt": "bool",
    "max_coeff": "non-negative",
    "min_coeff": "non-negative",
    "amsgrad": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}
MUON_PARAMS = {
    "lr": "rate",
    "muon_lr": "rate",
    "adam_lr": "rate",
    "momentum": "fraction",
    "nesterov": "bool",
    "weight_decay": "non-negative",
    "ns_steps": "positive count",
    "ns_coefficients": "three numbers",
    "ns_eps": "non-negative",
    "ns_method": "text",
    "ns_dtype": "text",
    "adjust_lr_fn": "text or null",
    "per_head_muon": "bool",
    "betas": "betas",
    "eps": "non-negative",
    "bias_correction": "bool",
    "adam_w_mode": "bool",
    "torch_adam": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}
"""Of matrices, and of Adam for the others: betas, eps, bias_correction, adam_w_mode, torch_adam."""
CHOICES = {
    "ns_method": ("standard", "gram"),
    "ns_dtype": ("auto", "fp32", "bf16", "fp16"),
    "adjust_lr_fn": ("original", "match_rms_adamw"),
}
"""Texts that keywords of Muon may be."""
_ONEBIT_PARAMS = {
    "lr": "rate",
    "betas": "betas",
    "eps": "non-negative",
    "weight_decay": "non-negative",
    "bias_correction": "bool",
    "eps_inside_sqrt": "bool",
    "cuda_aware": "bool",
    "comm_backend_name": "text",
    "amsgrad": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}
_ZERO_ONE_COUNTS = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
_ONEBIT_LAMB_NUMBERS = ("max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold")
OPTIMIZER_PARAMS: dict[str, dict[str, str]] = {
    "adam": ADAM_PARAMS,
    "adamw": ADAM_PARAMS,
    "sgd": SGD_PARAMS,
    "muadam": MU_ADAM_PARAMS,
    "muadamw": MU_ADAM_PARAMS,
    "musgd": {**SGD_PARAMS, "decoupled_wd": "bool"},
    "adagrad": ADAGRAD_PARAMS,
    "lion": LION_PARAMS,
    "lamb": LAMB_PARAMS,
    "muon": MUON_PARAMS,
    "onebitadam": {**_ONEBIT_PARAMS, "freeze_step": "positive count"},
    "zerooneadam": {**_ONEBIT_PARAMS, **dict.fromkeys(_ZERO_ONE_COUNTS, "positive count")},
    "onebitlamb": {
        **_ONEBIT_PARAMS,
        "freeze_step": "positive count",
        **dict.fromkeys(_ONEBIT_LAMB_NUMBERS, "non-negative"),
    },
}
OWN_OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "Lamb", "Muon", "SGD", "MuAdam", "MuAdamW", "MuSGD", "OneBitAdam",
                  "ZeroOneAdam", "OneBitLamb")  # fmt: skip
ONEBIT = ("onebitadam", "zerooneadam", "onebitlamb")
BACKENDS = ("nccl", "mpi", "compressed", "hccl")
COMMON_PARAMS = {name: ADAM_PARAMS[name] for name in ("lr", "betas", "eps", "weight_decay")}
"""Keywords with one meaning for all optimizers, used if the optimizer does not exist."""

_WARMUP = {
    "warmup_min_lr": "rates",
    "warmup_max_lr": "rates",
    "warmup_num_steps": "count",
    "warmup_type": "text",
    "last_batch_iteration": "integer",
}
SCHEDULE_PARAMS: dict[str, dict[str, str]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": "rates",
        "lr_range_test_step_size": "positive count",
        "lr_range_test_step_rate": "number",
        "lr_range_test_staircase": "bool",
        "last_batch_iteration": "integer",
    },
    "OneCycle": {
        "cycle_min_lr": "rate",
        "cycle_max_lr": "rate",
        "decay_lr_rate": "number",
        "cycle_first_step_size": "positive count",
        "cycle_second_step_size": "positive count or null",
        "cycle_first_stair_count": "integer",
        "cycle_second_stair_count": "integer or null",
        "decay_step_size": "count",
        "cycle_momentum": "bool",
        "cycle_min_mom": "number",
        "cycle_max_mom": "number",
        "decay_mom_rate": "number",
        "last_batch_iteration": "integer",
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": "count", **_WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": "count",
        "warmup_min_ratio": "number",
        "warmup_num_steps": "count",
        "cos_min_ratio": "number",
        "warmup_type": "text",
        "last_batch_iteration": "integer",
    },
}
SCHEDULE_REQUIRED: dict[str, tuple[str, ...]] = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
