"""Modules of a model that a group is for, and those that follow them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.techniques import ACTIVATIONS, WEIGHTS, Group, Pruning, WeightQuantization, by_method
from mpispeed.nn.tensor import ColumnLinear, RowLinear, VocabEmbedding, VocabLinear

Form = Literal["linear", "conv", "embedding", "norm"]

_FORMS: dict[Form, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear, ColumnLinear, RowLinear, VocabLinear),
    "conv": (nn.Conv2d,),
    "embedding": (nn.Embedding, VocabEmbedding),
    "norm": (nn.BatchNorm2d, nn.SyncBatchNorm),
}
_TAKES: dict[str, tuple[Form, ...]] = {
    WEIGHTS: ("linear", "conv", "embedding"),
    ACTIVATIONS: ("linear", "conv"),
    "sparse_pruning": ("linear", "conv"),
    "row_pruning": ("linear",),
    "head_pruning": ("linear",),
    "channel_pruning": ("conv",),
}
"""Method -> forms of layers that it can work on; "*" is those among them that are Linear or Conv2d."""


def form_of(module: nn.Module) -> Form | None:
    """What a compressible module is; None for others.

    The output layer of `nn.MultiheadAttention` is none, because its forward is never called, nor is one whose weight
    is no parameter of floats.
    """
    weight = module._parameters.get("weight")
    if isinstance(module, _FORMS["norm"]):
        return "norm"
    if weight is None or not weight.is_floating_point():
        return None
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return None
    if is_conv1d(module):
        return "linear"
    return next((form for form, types in _FORMS.items() if isinstance(module, types)), None)


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' `Conv1D`, a linear layer with the weight [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def out_dim_of(module: nn.Module) -> int:
    """The dim of the weight that counts outputs."""
    is_sliced = isinstance(module, (ColumnLinear, RowLinear))
    return 1 if is_conv1d(module) or (is_sliced and module.transposed) else 0


@dataclass(frozen=True, slots=True)
class Match:
    """A module that a group is for.

    Attributes:
        name: of the module.
        group: the group.
        related: names of modules that follow it, one for each keyword.
    """

    name: str
    group: Group
    related: tuple[str, ...] = ()


def match_groups(
    modules: Mapping[str, nn.Module], groups: Sequence[Group], elsewhere: Collection[str] = ()
) -> list[Match]:
    """Which modules the groups are for, method by method, in the model's order.

    Args:
        modules: of the model, by their names.
        groups: those of the config.
        elsewhere: names of modules that other pipeline stages have: a keyword may match these alone.

    Raises:
        ConfigError: an expression that is none, a module that two entries of a method match, an entry that matches
            nothing, related modules that do not fit.
    """
    found: list[Match] = []
    for method, own in by_method(list(groups)):
        taken: dict[str, Group] = {}
        for group in own:
            for match in _match_group(modules, method, group, elsewhere):
                if match.name in taken:
                    msg = (
                        f"{group.path}.modules: {match.name} was already added by the group {taken[match.name].name}; "
                        "a module may have each technique once, so make the expressions narrower"
                    )
                    raise ConfigError(msg)
                taken[match.name] = group
                found.append(match)
    return found


def _match_group(
    modules: Mapping[str, nn.Module], method: str, group: Group, elsewhere: Collection[str]
) -> Iterator[Match]:
    for place, keyword in enumerate(group.modules):
        forms = _TAKES[method] if keyword != "*" else tuple(form for form in _TAKES[method] if form != "embedding")
        names = [
            name
            for name in _search(modules, keyword, f"{group.path}.modules")
            if form_of(modules[name]) in forms and not any(_search([name], each, group.path) for each in group.excluded)
        ]
        if not names and not _search(elsewhere, keyword, group.path):
            _refuse(
                f"{group.path}.modules",
                f"{keyword!r} matches no {' or '.join(forms)} layer of the model",
                "; it is searched for as a regular expression in names of modules, as model.named_modules() has them",
            )
        related = [_followers(modules, each, group) for each in (group.related[place] if group.related else ())]
        for keyword_related, followers in zip(group.related[place] if related else (), related, strict=True):
            if len(followers) != len(names):
                what = f"{keyword_related!r} matches {len(followers)} layers, and {keyword!r} {len(names)}"
                _refuse(f"{group.path}.related_modules", what, "; each needs one that follows it, in the same order")
        for index, name in enumerate(names):
            own = tuple(followers[index] for followers in related)
            for follower in own:
                _check_follower(modules, name, follower, group)
            yield Match(name, group, own)


def _search(names: Collection[str], keyword: str, path: str) -> list[str]:
    if keyword == "*":
        return list(names)
    try:
        pattern = re.compile(keyword)
    except re.error as error:
        _refuse(path, f"{keyword!r} is no regular expression: {error}", "")
    return [name for name in names if pattern.search(name)]


def _followers(modules: Mapping[str, nn.Module], keyword: str, group: Group) -> list[str]:
    names = _search(modules, keyword, f"{group.path}.related_modules")
    return [name for name in names if form_of(modules[name]) in ("linear", "conv", "norm")]


def _check_follower(modules: Mapping[str, nn.Module], name: str, follower: str, group: Group) -> None:
    """Refuse one that cannot shrink with the module."""
    technique, layer, other = group.technique, modules[name], modules[follower]
    if not isinstance(technique, Pruning) or technique.kind == "sparse":
        _refuse(f"{group.path}.related_modules", "nothing shrinks with this technique", "; leave it away")
    if technique.kind != "head" and any(getattr(each, "groups", 1) != 1 for each in (layer, other)):
        what = f"{name} or {follower} is a convolution in groups, which cannot lose channels"
        _refuse(f"{group.path}.related_modules", what, "; leave it out")
    if technique.kind == "head":
        have, want = width_of(other, "out"), width_of(layer, "in")
    else:
        have, want = width_of(other, "in"), width_of(layer, "out")
    if have != want:
        what = f"{follower} has {have} entries where {name} has {want}"
        _refuse(f"{group.path}.related_modules", what, "; name the layers in one order, those that follow one another")


def width_of(module: nn.Module, side: Literal["in", "out"]) -> int:
    """Inputs or outputs of a layer. Those of a sliced one are this rank's."""
    form = form_of(module)
    if form == "norm":
        return int(module.num_features)  # type: ignore[arg-type]
    names = {"in": ("in_channels",), "out": ("out_channels",)} if form == "conv" else _LINEAR_WIDTHS
    for each in names[side]:
        width = getattr(module, each, None)
        if isinstance(width, int):
            return width
    weight = module._parameters["weight"]
    dim = out_dim_of(module)
    return 0 if weight is None else weight.shape[dim if side == "out" else 1 - dim]


_LINEAR_WIDTHS: dict[str, tuple[str, ...]] = {"in": ("in_features", "nx"), "out": ("out_features", "nf")}


def check_technique(name: str, module: nn.Module, group: Group, shape: tuple[int, ...]) -> None:
    """Refuse what a layer of this shape cannot have.

    Raises:
        ConfigError: bits, groups or heads do not fit.
    """
    technique = group.technique
    if isinstance(technique, WeightQuantization):
        form = form_of(module)
        if form == "conv" and technique.target_bits < 4:
            _refuse(group.path, f"{name} is a convolution with target_bits {technique.target_bits}", "; use at least 4")
        groups = technique.quantizer.groups
        if form != "embedding" and math.prod(shape) % groups:
            what = f"quantize_groups {groups} does not divide the {math.prod(shape)} elements of {name}"
            _refuse(f"compression_training.{WEIGHTS}.shared_parameters.quantize_groups", what, "; choose a divisor")
    if isinstance(technique, Pruning) and technique.kind == "head":
        width = shape[1 - out_dim_of(module)]
        if not technique.num_heads or width % technique.num_heads:
            what = f"num_heads {technique.num_heads} does not divide the {width} columns of {name}"
            _refuse(group.path, what, "; give the number of heads of its attention")


def _refuse(path: str, what: str, cure: str) -> NoReturn:
    msg = f"{path}: {what}{cure}"
    raise ConfigError(msg)
