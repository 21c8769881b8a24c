"""Options of activation checkpointing: the keys of the section `activation_checkpointing`, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpispeed.base.errors import ConfigError

SECTION = "activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Options:
    """Storage options of activations kept for backward.

    Args:
        partition_activations: keep a slice of each on every rank of the slicing group.
        contiguous_memory_optimization: keep them in one buffer of `number_checkpoints` slots.
        number_checkpoints: calls that are checkpointed before any of their backward passes has run.
        cpu_checkpointing: keep them in host memory.
        synchronize_checkpoint_boundary: wait for the device at each end of each pass of a call.
        profile: time the passes of each call and log them.
        strict_partition: refuse activations that the slicing group does not divide, instead of padding.
    """

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    strict_partition: bool = False

    def checked(self) -> Options:
        """These options, checked.

        Raises:
            ConfigError: a value is of the wrong kind, or values do not fit together.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            if name != "number_checkpoints" and not isinstance(value, bool):
                _refuse(name, f"expected true or false, found {value!r}")
        number = self.number_checkpoints
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            _refuse("number_checkpoints", f"expected a whole number from 1, found {number!r}")
        if self.contiguous_memory_optimization:
            if not self.partition_activations:
                _refuse(
                    "contiguous_memory_optimization",
                    "contiguous checkpointing is only available with partitioned activations; set "
                    "partition_activations to true",
                )
            if number is None:
                _refuse("contiguous_memory_optimization", "needs number_checkpoints, the calls of a forward pass")
        return self


def read(config: Any) -> Options:
    """The options of a configuration.

    Args:
        config: None, a mapping, a path of a JSON file, or an object that has the section as an attribute.

    Raises:
        ConfigError: the file cannot be read, or the section has keys or values that it does not take.
    """
    if config is None:
        return Options()
    if isinstance(config, str | Path):
        config = read_file(config)
    section = config.get(SECTION, {}) if isinstance(config, Mapping) else getattr(config, SECTION, {})
    if isinstance(section, Mapping):
        unknown = sorted(set(section) - set(Options.__slots__))
        if unknown:
            _refuse(unknown[0], f"unknown key; the section takes {', '.join(Options.__slots__)}")
        return Options(**section).checked()
    found = {name: getattr(section, name) for name in Options.__slots__ if hasattr(section, name)}
    return Options(**found).checked()


def override(options: Options, **explicit: Any) -> Options:
    """These options, but for the explicit ones that are not None.

    Raises:
        ConfigError: the resulting options do not fit together.
    """
    given = {name: value for name, value in explicit.items() if value is not None}
    return replace(options, **given).checked()


def read_file(path: str | Path) -> Any:
    """The content of a JSON file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        msg = f"checkpointing.configure: {path} cannot be read as JSON: {error}"
        raise ConfigError(msg) from error


def _refuse(name: str, what: str) -> None:
    msg = f"{SECTION}.{name}: {what}"
    raise ConfigError(msg)
