"""Rules from the optimizer section of a JSON file: own rules first, then the classes of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpispeed.base import torch_names
from mpispeed.base.errors import ConfigError
from mpispeed.base.registry import did_you_mean
from mpispeed.optim import adagrad, adam, lamb, lion, muon, mup, onebit_adam, onebit_lamb, sgd, zero_one_adam
from mpispeed.optim.cpu import CPUAdagrad, CPUAdam, CPULamb, CPULion
from mpispeed.optim.exchange import Needs
from mpispeed.optim.foreign import Foreign
from mpispeed.optim.fused import FusedAdagrad, FusedAdam, FusedLamb, FusedLion
from mpispeed.optim.host_optimizer import HostOptimizer
from mpispeed.optim.onebit import OnebitAdam, OnebitLamb, OneBitOptimizer, ZeroOneAdam
from mpispeed.optim.rule import RULES, Rule, drop_auto

if TYPE_CHECKING:
    import torch

_RULE_MODULES = (adagrad, adam, lamb, lion, muon, mup, onebit_adam, onebit_lamb, sgd, zero_one_adam)
"""Imported because each registers its rules in `RULES`."""

_OWN = (CPUAdagrad, CPUAdam, CPULamb, CPULion, FusedAdagrad, FusedAdam, FusedLamb, FusedLion)
_OWN_ONEBIT = (OnebitAdam, OnebitLamb, ZeroOneAdam)
"""Optimizers that stand for a rule."""


_NEEDS = {
    "onebitadam": Needs(divides_nodes=True),
    "zerooneadam": Needs(divides_nodes=True, whole_states=True),
    "onebitlamb": Needs(divides_nodes=True, whole_states=True),
}
"""By name in lower case; the others sum gradients and need nothing."""

TESTED_FOR_CUTS = ("Adam", "AdamW", "Adagrad", "Lion", "OneBitAdam", "Muon", *mup.NAMES)
"""Optimizers tested on flat shards; others need `zero_allow_untested_optimizer`."""


def needs_of(name: str) -> Needs:
    """What an optimizer asks of a plan, by its name in a JSON file, without case; nothing if it is none of ours."""
    return _NEEDS.get(name.lower(), Needs())


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule for an optimizer object that was passed in; its groups go on to decide on hyper-parameters.

    One of ours gives the rule of its name in a JSON file, so that states may be sharded and in files; any other updates
    windows by itself. Only exact classes are ours, since a subclass may do anything.

    Raises:
        ConfigError: it cannot be used.
    """
    clips = any(group.get("max_grad_norm") for group in optimizer.param_groups)  # FusedLamb, group by group
    if isinstance(optimizer, HostOptimizer) and type(optimizer) in _OWN and not clips:
        return optimizer.rule
    if isinstance(optimizer, OneBitOptimizer):
        if type(optimizer) in _OWN_ONEBIT:
            return optimizer.rule
        msg = (
            f"the optimizer {type(optimizer).__name__} is derived from {type(optimizer).__mro__[1].__name__}, whose "
            "update is the engine's and would not be the derived one's; pass an object of the class itself"
        )
        raise ConfigError(msg)
    return Foreign(optimizer)


def kind_of(optimizer: Any, configured: str | None) -> str:
    """The name in a JSON file of an optimizer that was passed in, in lower case; else that of the config, or "".

    An optimizer of another kind, or one that a callable will make, gives "".
    """
    if optimizer is None:
        return (configured or "").lower()
    return optimizer.type_name.lower() if isinstance(optimizer, OneBitOptimizer) else ""


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
    classes = torch_names.optimizers()
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
