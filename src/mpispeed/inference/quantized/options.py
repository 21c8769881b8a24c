"""Options of the quantization of a model, from plain values of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpispeed.base.errors import ConfigError

GROUP_SIZES = {8: 128, 4: 64}
"""Default inputs that share a scale, by bits."""

_LANE = 16


@dataclass(frozen=True, slots=True)
class Rule:
    """Form of the weights of layers with a given text in their path.

    Attributes:
        bits: 8 or 4.
        group_size: elements that share a scale; it has to divide the size of the weight along `group_dim`.
        group_dim: dim of the weight along which groups lie, 0 or 1.
        symmetric: no offsets.
    """

    bits: int = 8
    group_size: int = 64
    group_dim: int = 1
    symmetric: bool = False


@dataclass(frozen=True, slots=True)
class QuantOptions:
    """Choice of layers of a model and form of their weights.

    Attributes:
        bits: 8 or 4.
        group_size: inputs that share a scale; None: 128 of 8 bits, 64 of 4.
        groups: groups of the inputs of each output, instead of `group_size`: at most so many, of a multiple of 16
            inputs each.
        mlp_extra: twice as many groups in layers of an MLP.
        symmetric: no offsets. With them a group spans its least to its greatest value.
        qkv: layers to queries, keys and values too.
        heads: linear layers outside of the blocks too, such as the one to logits.
        embeddings: tables too.
        experts: experts' tensors too, where experts are tensors of three dims.
        skip: texts; layers with one of them in their path are left out.
        least: weights with fewer elements are left out.
        named: text -> how layers with it in their path are quantized, whatever else is said.
        only_named: all other layers are left out.
    """

    bits: int = 8
    group_size: int | None = None
    groups: int | None = None
    mlp_extra: bool = False
    symmetric: bool = True
    qkv: bool = True
    heads: bool = False
    embeddings: bool = False
    experts: bool = True
    skip: tuple[str, ...] = ()
    least: int = 1024
    named: tuple[tuple[str, Rule], ...] = ()
    only_named: bool = False

    def __post_init__(self) -> None:
        size, groups = self.group_size, self.groups
        if self.bits not in GROUP_SIZES:
            msg = f"weights of {self.bits} bits; use 8 or 4"
            raise ConfigError(msg)
        if size is not None and (size < 1 or (self.bits == 4 and size % 2)):
            msg = f"groups of {size} inputs; use a positive number, even for 4 bits, e.g. {GROUP_SIZES[self.bits]}"
            raise ConfigError(msg)
        if groups is not None and groups < 1:
            msg = f"{groups} groups of inputs; use at least 1"
            raise ConfigError(msg)

    def group_of(self, inputs: int, *, is_mlp: bool) -> int:
        """Inputs that share a scale in a layer with so many of them."""
        if self.groups is None:
            size = self.group_size or GROUP_SIZES[self.bits]
            return max(2, size // 4 * 2) if is_mlp and self.mlp_extra else size
        groups = self.groups * (2 if is_mlp and self.mlp_extra else 1)
        return -(-inputs // (groups * _LANE)) * _LANE


def options_of(quant: Mapping[str, Any], *, is_int8: bool) -> QuantOptions | None:
    """The options that the section `quant` of `init_inference` asks for; None if nothing is to be quantized.

    Args:
        quant: plain values of the keys that were given: `enabled`, `weight` (`enabled`, `num_bits`, `q_type`,
            `q_groups`, `mlp_extra_grouping`, `quantized_initialization`, `post_init_quant`), `qkv`.
        is_int8: `dtype` is int8: all layers of the blocks are quantized, and not only those named in
            `post_init_quant`.

    Raises:
        ConfigError: a value does not fit.
    """
    weight = quant.get("weight") or {}
    if not (quant.get("enabled", True) and weight.get("enabled", True)):
        return None
    named = tuple(rules_of(weight.get("post_init_quant") or {}).items())
    initial = weight.get("quantized_initialization") or {}
    if not (is_int8 or named or initial):
        return None
    settings: dict[str, Any] = {"named": named, "only_named": not (is_int8 or initial)}
    if initial:
        rule = rule_of("quantized_initialization", initial)
        settings.update(bits=rule.bits, group_size=rule.group_size, symmetric=rule.symmetric)
        if rule.group_dim != 1:
            msg = f"quantized_initialization.group_dim is {rule.group_dim}; use 1: inputs of an output share a scale"
            raise ConfigError(msg)
    else:
        settings.update(
            bits=weight.get("num_bits", 8), groups=weight.get("q_groups"),
            symmetric=weight.get("q_type", "symmetric") == "symmetric",
        )  # fmt: skip
    settings["mlp_extra"] = bool(weight.get("mlp_extra_grouping", False))
    settings["qkv"] = bool((quant.get("qkv") or {}).get("enabled", True))
    return QuantOptions(**settings)


def rules_of(settings: Mapping[str, Any]) -> dict[str, Rule]:
    """Text -> rule, from `weight_quantization.post_init_quant`.

    Raises:
        ConfigError: a value does not fit.
    """
    return {text: rule_of(f"post_init_quant.{text}", given) for text, given in settings.items()}


def rule_of(path: str, given: Any) -> Rule:
    """One of them. `path` is for errors."""
    if not isinstance(given, Mapping):
        msg = f"{path} is {given!r}; give a section with num_bits and group_size"
        raise ConfigError(msg)
    allowed = ("num_bits", "group_size", "group_dim", "symmetric")
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        msg = f"{path}.{unknown[0]} is not known; the keys are {', '.join(allowed)}"
        raise ConfigError(msg)
    rule = Rule(given.get("num_bits", 8), given.get("group_size", 64), given.get("group_dim", 1),
                given.get("symmetric", False))  # fmt: skip
    if rule.bits not in GROUP_SIZES or isinstance(rule.bits, bool):
        msg = f"{path}.num_bits is {rule.bits!r}; use 8 or 4"
        raise ConfigError(msg)
    if rule.group_dim not in (0, 1) or isinstance(rule.group_dim, bool):
        msg = f"{path}.group_dim is {rule.group_dim!r}; use 0 or 1"
        raise ConfigError(msg)
    if not isinstance(rule.group_size, int) or rule.group_size < 1 or (rule.bits == 4 and rule.group_size % 2):
        msg = f"{path}.group_size is {rule.group_size!r}; use a positive number, even for 4 bits"
        raise ConfigError(msg)
    if not isinstance(rule.symmetric, bool):
        msg = f"{path}.symmetric is {rule.symmetric!r}; use true or false"
        raise ConfigError(msg)
    return rule
