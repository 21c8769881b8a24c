"""Settings that are understood but not implemented yet. Delete a row when its part arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpispeed.base.errors import ConfigError
from mpispeed.config.problems import Problem, refuse
from mpispeed.config.root import Config


class Row(NamedTuple):
    """A setting, the test that it asks for the missing part, and the sentence."""

    path: str
    asks: Callable[[Any], bool]
    sentence: str


def _is_on(section: Any) -> bool:
    return bool(section.enabled)


def _any_of(*names: str) -> Callable[[Any], bool]:
    return lambda section: any(getattr(section, name) for name in names)


_Z = "zero_optimization"
UNAVAILABLE: tuple[Row, ...] = (
    Row(
        "expert_parallel.score_apply",
        lambda value: value == "pre",
        "weights for inputs of experts are not available; use post, as the models do, or auto",
    ),
    Row("expert_parallel.comm_backend", lambda value: value == "deepep", "deepep is not available; use comm"),
    Row("hybrid_engine", _is_on, "the hybrid engine is not available; set enabled to false"),
    Row(
        "weight_quantization",
        _any_of("quantized_initialization", "post_init_quant"),
        "not available in training; give these keys to init_inference, in quant.weight",
    ),
)  # fmt: skip


def find_unavailable(config: Config) -> list[Problem]:
    """All settings that ask for a missing part."""
    found = []
    for row in UNAVAILABLE:
        value: Any = config
        for key in row.path.split("."):
            value = getattr(value, key)
        if row.asks(value):
            found.append(Problem(row.path, row.sentence))
    return found


def require_available(config: Config, where: str = "configuration") -> None:
    """Refuse settings that are not implemented yet, all at once.

    Raises:
        ConfigError: at least one setting asks for a missing part.
    """
    problems = find_unavailable(config)
    if problems:
        error: ConfigError = refuse(where, problems)
        raise error
