"""From the optimizer section of a JSON file to a rule: own rules first, then the classes of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.registry import did_you_mean
from mpispeed.optim.foreign import Foreign
from mpispeed.optim.rule import RULES, Rule, drop_auto


def torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizer classes of torch.optim by name."""
    found = {name: entry for name, entry in vars(torch.optim).items() if isinstance(entry, type)}
    base = torch.optim.Optimizer
    return {name: entry for name, entry in found.items() if issubclass(entry, base) and entry is not base}


def build(type_name: str, params: Mapping[str, Any] | None = None) -> tuple[Rule, dict[str, Any]]:
    """The rule called `type_name` and the defaults of its parameter groups; `params` is not modified.

    Names of own rules are compared without case, classes of torch.optim exactly. Values left at
    "auto" count as absent.

    Raises:
        ConfigError: the name is unknown, or a parameter is unknown or out of range.
    """
    given = drop_auto(params)
    if "max_grad_norm" in given:
        msg = (
            f"max_grad_norm ({given['max_grad_norm']!r}) is in the params of the optimizer {type_name}; "
            'clipping is set by the top-level key "gradient_clipping", move it there'
        )
        raise ConfigError(msg)
    if type_name in RULES:
        return RULES[type_name](given)
    classes = torch_optimizers()
    if type_name not in classes:
        own = sorted(RULES)
        theirs = sorted(name for name in classes if name not in RULES)
        msg = (
            f"{type_name!r} is not a supported optimizer type (optimizer.type); known are {', '.join(own)} "
            f"in any case and {', '.join(theirs)} of torch.optim.{did_you_mean(type_name, [*own, *theirs])}"
        )
        raise ConfigError(msg)
    foreign = Foreign(classes[type_name], given)
    return foreign, dict(foreign.defaults)
