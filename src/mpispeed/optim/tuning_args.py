"""Command-line arguments for the schedules, and the scheduler section that follows from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

VALID_LR_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

# Arguments whose values become params, by the family of schedules that takes them. All three warm-up
# schedules read the same four; total_num_steps has no argument and has to be added by the caller.
_RANGE_TEST = (
    "lr_range_test_min_lr",
    "lr_range_test_step_rate",
    "lr_range_test_step_size",
    "lr_range_test_staircase",
)
_ONE_CYCLE = (
    "cycle_first_step_size",
    "cycle_first_stair_count",
    "cycle_second_step_size",
    "cycle_second_stair_count",
    "decay_step_size",
    "cycle_min_lr",
    "cycle_max_lr",
    "decay_lr_rate",
    "cycle_min_mom",
    "cycle_max_mom",
    "decay_mom_rate",
)
_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")
_FAMILY = {
    "LRRangeTest": _RANGE_TEST,
    "OneCycle": _ONE_CYCLE,
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP,
    "WarmupCosineLR": _WARMUP,
}
_LR_KEY = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr"}
_UNSET_IF_MINUS_ONE = frozenset({"cycle_second_step_size", "cycle_second_stair_count"})

# (name, type, default, help)
_ARGUMENTS: tuple[tuple[str, type, Any, str], ...] = (
    ("lr_schedule", str, None, "schedule to train with: " + ", ".join(VALID_LR_SCHEDULES)),
    ("lr_range_test_min_lr", float, 0.001, "range test: lr to start from"),
    ("lr_range_test_step_rate", float, 1.0, "range test: growth per interval, as a share of the start"),
    ("lr_range_test_step_size", int, 1000, "range test: steps per interval"),
    ("cycle_first_step_size", int, 1000, "one cycle: steps of the rise"),
    ("cycle_first_stair_count", int, -1, "one cycle: accepted, without effect"),
    ("cycle_second_step_size", int, -1, "one cycle: steps of the fall; -1: as many as for the rise"),
    ("cycle_second_stair_count", int, -1, "one cycle: accepted, without effect"),
    ("decay_step_size", int, 1000, "one cycle: steps per interval of the decay; 0: no decay"),
    ("cycle_min_lr", float, 0.01, "one cycle: lowest lr"),
    ("cycle_max_lr", float, 0.1, "one cycle: highest lr"),
    ("decay_lr_rate", float, 0.0, "one cycle: decay of the lr per interval"),
    ("cycle_min_mom", float, 0.8, "one cycle: lowest momentum"),
    ("cycle_max_mom", float, 0.9, "one cycle: highest momentum"),
    ("decay_mom_rate", float, 0.0, "one cycle: growth of the momentum per interval of the decay"),
    ("warmup_min_lr", float, 0.0, "warm-up: lr to start from"),
    ("warmup_max_lr", float, 0.001, "warm-up: lr at its end"),
    ("warmup_num_steps", int, 1000, "warm-up: steps"),
    ("warmup_type", str, "log", "warm-up: log or linear"),
    ("warmup_min_ratio", float, 0.01, "warm-up with cosine: share of the optimizer's lr to start from"),
    ("cos_min_ratio", float, 0.01, "warm-up with cosine: share of the optimizer's lr to end with"),
)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of all schedules to `parser` and return it."""
    group = parser.add_argument_group("Convergence Tuning", "Learning-rate schedules")
    for name, kind, default, text in _ARGUMENTS:
        group.add_argument(f"--{name}", type=kind, default=default, help=text)
    group.add_argument(
        "--lr_range_test_staircase",
        type=_truth,
        nargs="?",
        const=True,
        default=False,
        help="range test: change the lr at the ends of intervals only; alone, or with true or false",
    )
    group.add_argument("--cycle_momentum", action="store_true", help="one cycle: cycle the momentum as well")
    return parser


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The known arguments and the rest, of `arguments` or of the command line."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args(arguments)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write the arguments of all families that have a value into `params`."""
    for family in (_RANGE_TEST, _ONE_CYCLE, _WARMUP):
        _copy(args, family, params)


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The scheduler section that `args` ask for and None, or None and the reason why there is none."""
    name = getattr(args, "lr_schedule", None)
    if name is None:
        return None, "--lr_schedule not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a supported lr_schedule; supported are {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    _copy(args, _FAMILY[name], params)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The lr to give the optimizer for the scheduler section `config` and "", or None and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"lr schedule {key} not defined in config"
    name, params = config["type"], config["params"] or {}
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a valid lr schedule; valid are {', '.join(VALID_LR_SCHEDULES)}"
    key = _LR_KEY.get(name, "warmup_max_lr")
    if key not in params:
        return None, f"the params of {name} have no {key}, the lr is that of the optimizer or a default"
    return params[key], ""


def _copy(args: argparse.Namespace, names: Sequence[str], params: dict[str, Any]) -> None:
    for name in names:
        value = getattr(args, name, None)
        if value is not None and not (name in _UNSET_IF_MINUS_ONE and value == -1):
            params[name] = value


def _truth(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off", ""):
        return False
    msg = f"expected true or false, found {text!r}"
    raise argparse.ArgumentTypeError(msg)
