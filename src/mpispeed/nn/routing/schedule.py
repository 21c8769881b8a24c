"""The reserved length of random-LTD: how many tokens of a sample a layer sees at a step, and the tokens seen so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpispeed.base.errors import ConfigError, UnimplementedOption

_COUNTS = ("total_layer_num", "random_ltd_layer_num", "global_batch_size")
_SCHEDULE = ("min_value", "max_value")
_NUMBERS = ("require_steps", "seq_per_step")


class RandomLTDScheduler:
    """Grows the reserved length linearly, and counts layer tokens.

    Layer tokens of a step are the tokens of its global batch, once for each layer that sees them; a layer that drops
    none counts with `max_value` tokens of a sample.

    Attributes:
        model_layer_num: layers of the model.
        random_ltd_layer_num: those that drop tokens.
        global_batch_size: samples of a global batch.
        state: DeepSpeed's names: "min_value", "max_value" and "current_value" in tokens, "consumed_layer_tokens",
            "current_steps" (the step that was counted last, -1: none), "schedule_type" and "schedule_config".

    Source: DeepSpeed's class of this name; Yao et al., "Random-LTD", arXiv 2211.11586.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Start at `min_value`.

        Args:
            config: the section `random_ltd`, with `global_batch_size`.

        Raises:
            ConfigError: (a ValueError) a number is missing or does not fit.
            UnimplementedOption: (a NotImplementedError) `layer_token_lr_schedule` is enabled.
        """
        if (config.get("layer_token_lr_schedule") or {}).get("enabled"):
            msg = "random_ltd.layer_token_lr_schedule.enabled is true; a learning rate by layer tokens is not offered"
            raise UnimplementedOption(msg)
        counts = [_positive(config, key, "", least=int(key != "random_ltd_layer_num")) for key in _COUNTS]
        self.model_layer_num, self.random_ltd_layer_num, self.global_batch_size = counts
        if self.random_ltd_layer_num > self.model_layer_num:
            msg = (
                f"random_ltd.random_ltd_layer_num is {self.random_ltd_layer_num}, and total_layer_num "
                f"{self.model_layer_num}: no more layers can drop tokens than there are"
            )
            raise ConfigError(msg)
        schedule = config.get("random_ltd_schedule") or {}
        kind = schedule.get("schedule_type")
        if kind != "fixed_linear":
            msg = f"random_ltd.random_ltd_schedule.schedule_type is {kind!r}; fixed_linear is the one there is"
            raise ConfigError(msg)
        least, most = (_positive(schedule, key, "random_ltd_schedule.") for key in _SCHEDULE)
        if least > most:
            msg = f"random_ltd.random_ltd_schedule: min_value is {least} and max_value {most}; the length only grows"
            raise ConfigError(msg)
        numbers = schedule.get("schedule_config") or {}
        found = {key: _positive(numbers, key, "random_ltd_schedule.schedule_config.") for key in _NUMBERS}
        self._start = {"min_value": least, "max_value": most, "schedule_type": kind, "schedule_config": found}
        self.state: dict[str, Any] = {}
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Return to the first step."""
        self.state = {
            **self._start,
            "current_value": self._start["min_value"],
            "consumed_layer_tokens": 0,
            "current_steps": -1,
        }

    # -- as a function of the step ----------------------------------------------------------------------------------

    def get_value(self, global_steps: int) -> int:
        """The reserved length in tokens at a step: a multiple of `seq_per_step`, from `min_value` to `max_value`.

        A `min_value` or `max_value` that is no multiple is kept at the ends.
        """
        least, most, numbers = self.state["min_value"], self.state["max_value"], self.state["schedule_config"]
        grown = math.floor(global_steps / numbers["require_steps"] * (most - least) + least)
        return int(max(least, min(grown - grown % numbers["seq_per_step"], most)))

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Layer tokens of the first `train_iters` steps of a run; nothing is counted."""
        return sum(self._tokens(self.get_value(step)) for step in range(train_iters))

    def _tokens(self, reserved: int) -> int:
        whole = self.model_layer_num - self.random_ltd_layer_num
        return self.global_batch_size * (reserved * self.random_ltd_layer_num + int(self.state["max_value"]) * whole)

    # -- the current step -------------------------------------------------------------------------------------------

    def update_seq(self, global_steps: int) -> None:
        """Move to a step, and count its layer tokens unless that was done already."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            self.state["consumed_layer_tokens"] += self._tokens(self.state["current_value"])
            self.state["current_steps"] = global_steps

    def get_current_seq(self) -> int:
        """The reserved length in tokens."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Set the reserved length; the next step goes on from the schedule unless this is `max_value` or more."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Layers that drop tokens."""
        return self.random_ltd_layer_num

    # -- state ------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """`state` itself."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Replace `state`."""
        self.state = state

    def state_dict(self) -> dict[str, int]:
        """What changes during a run, and the ends of the schedule."""
        names = ("consumed_layer_tokens", "current_steps", "current_value", *_SCHEDULE)
        return {name: self.state[name] for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the values of `state_dict()`."""
        for name in self.state_dict():
            self.state[name] = int(state_dict[name])


def _positive(section: Mapping[str, Any], key: str, path: str, least: int = 1) -> int:
    """Raises ConfigError: the section has no such whole number."""
    value = section.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        msg = f"random_ltd.{path}{key} is {value!r}; random-LTD needs a whole number, {least} or more"
        raise ConfigError(msg)
    return value
