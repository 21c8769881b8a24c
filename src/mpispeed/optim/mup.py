"""muP: Adam, AdamW and SGD with rates and weight decays by the widths of parameters.

A parameter says its widths by its attribute `infshape`, which the package mup sets: a sequence of dims, each with its
size `dim` and its size `base_dim` in a base model, None for a dim that does not grow with the model.

Source: Yang et al., "Tensor Programs V", 2022 (arXiv 2203.03466), table 3; groups, and their order, as those of
`mup.optim` of the package mup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.param_marks import INFSHAPE
from mpispeed.optim.adam import DEFAULTS, Adam
from mpispeed.optim.foreign import make_empty
from mpispeed.optim.host_rule import read_hyper
from mpispeed.optim.rule import LR_FACTOR, RULES, Rule, drop_auto
from mpispeed.optim.torch_rule import TorchRule

if TYPE_CHECKING:
    from torch import Tensor, nn

NAMES = ("MuAdam", "MuAdamW", "MuSGD")
_DECOUPLED = "decoupled_wd"
_HINTS = ("foreach", "fused", "capturable", "differentiable")
"""How torch is to compute; they do not change the result."""
_BY_TORCH = ("amsgrad", "maximize")
"""Variants that the compiled loop does not have."""
_MOST_NAMES = 3
_MATRIX, _VECTOR, _FIXED = range(3)  # in the order of groups


class Width(NamedTuple):
    """Widths of the parameters of one group; sorted, the order of groups.

    Attributes:
        group: the group of the script that they are of.
        kind: 0: two dims grow, 1: one, 2: none; rules of Adam take the last two alike.
        up, down: the rate is that of the script times `up`, divided by `down`; the weight decay the other way.
    """

    group: int
    kind: int
    up: float
    down: float


class Widths:
    """Parameters of an optimizer by their widths."""

    def __init__(self, name: str, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
        """Read the widths of all parameters of the groups.

        Args:
            name: of the optimizer.
            model: has names for the parameters.
            groups: with a rate `lr` and a `weight_decay` each.

        Raises:
            ConfigError: a parameter has no widths, or more than two dims that grow.
        """
        self._groups, is_sgd = groups, name.lower() == "musgd"
        names = {id(param): text for text, param in model.named_parameters()}
        bare = [p for group in groups for p in group["params"] if getattr(p, INFSHAPE, None) is None]
        if bare:
            shown = ", ".join(names.get(id(p), str(tuple(p.shape))) for p in bare[:_MOST_NAMES])
            msg = (
                f"the optimizer {name} scales rates by widths, but {len(bare)} parameters have no infshape ({shown}"
                f"{', ...' if len(bare) > _MOST_NAMES else ''}); call mup.set_base_shapes(model, base) of the package "
                "mup before initialize, with a smaller model of the same kind as base, or use Adam, AdamW or SGD"
            )
            raise ConfigError(msg)
        self._params: dict[Width, list[Tensor]] = {}
        for index, group in enumerate(groups):
            for param in group["params"]:
                width = _width(index, param, name, names.get(id(param), "?"), is_sgd=is_sgd)
                self._params.setdefault(width, []).append(param)

    @property
    def found(self) -> list[Width]:
        """Those of the parameters, in the order in which they come."""
        return list(self._params)

    def groups(self, all_widths: Sequence[Width]) -> list[dict[str, Any]]:
        """A group for each of these widths, in the order of the package mup, some of them perhaps empty.

        Every group has `LR_FACTOR`, what its rate is to that of the script.
        """
        made = []
        for width in sorted(dict.fromkeys(all_widths), key=lambda width: width[:2]):  # stable: else as they come
            group = dict(self._groups[width.group])
            keeps = group.pop(_DECOUPLED, False)
            group["params"] = self._params.get(width, [])
            group["lr"] = float(group["lr"]) * width.up / width.down
            if not keeps:
                group["weight_decay"] = group["weight_decay"] * width.down / width.up
            group[LR_FACTOR] = width.up / width.down
            made.append(group)
        return made


def _width(index: int, param: Tensor, name: str, param_name: str, *, is_sgd: bool) -> Width:
    infshape: Any = getattr(param, INFSHAPE)
    growing = [_growth(dim) for dim in infshape if dim.base_dim is not None]
    if len(growing) > 2:
        msg = (
            f"the infshape of {param_name} has {len(growing)} dims that grow with the model ({infshape}); {name} knows "
            "what to do with at most two, as an input and an output of a layer"
        )
        raise ConfigError(msg)
    main = getattr(infshape, "main", None)  # scripts may set another than the last dim that grows
    own = _growth(main) if main is not None else growing[-1] if growing else 1.0
    kind = (_FIXED, _VECTOR, _MATRIX)[len(growing)]
    if not is_sgd:
        return Width(index, kind, 1.0, own) if kind == _MATRIX else Width(index, _VECTOR, 1.0, 1.0)
    if kind == _MATRIX:
        return Width(index, kind, 1.0, growing[1] / growing[0])  # inputs to outputs
    return Width(index, kind, own if kind == _VECTOR else 1.0, 1.0)


def _growth(dim: Any) -> float:
    """How many times a dim is its size in the base model."""
    return float(dim.dim / dim.base_dim)


def _build(name: str, is_decoupled: bool, params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    keeps = _read_decoupled(name, params)
    rule: Rule
    if any(params.get(key) for key in _BY_TORCH):
        cls = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        theirs = TorchRule(make_empty(cls, {"weight_decay": 0.0, **params}))
        theirs.name, theirs.kinds = name, theirs.kinds | {name}
        rule = theirs
    else:
        known = {key: default for key, default in DEFAULTS.items() if key != "bias_correction"}
        hyper = read_hyper(name, params, known, (*_HINTS, *_BY_TORCH))
        rule = Adam(adam_w_mode=is_decoupled, name=name, **hyper)
    return rule, {**rule.defaults, _DECOUPLED: keeps}


def _read_decoupled(name: str, params: dict[str, Any]) -> bool:
    """Take the keyword that leaves weight decay as it is, which newer versions of the package mup have."""
    keeps = params.pop(_DECOUPLED, False)
    if not isinstance(keeps, bool):
        msg = f"{_DECOUPLED} of the optimizer {name} is {keeps!r}; expected true or false"
        raise ConfigError(msg)
    return keeps


@RULES.register("MuAdam")
def _build_adam(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    # The package's is torch.optim.Adam: weight decay is in the gradient.
    return _build("MuAdam", False, params)


@RULES.register("MuAdamW")
def _build_adamw(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    return _build("MuAdamW", True, params)


@RULES.register("MuSGD")
def _build_sgd(params: dict[str, Any]) -> tuple[Rule, dict[str, Any]]:
    params = drop_auto(params)
    keeps = _read_decoupled("MuSGD", params)
    rule, defaults = RULES["SGD"](params)
    rule.name = "MuSGD"
    return rule, {**defaults, _DECOUPLED: keeps}
