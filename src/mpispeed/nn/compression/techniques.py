"""The techniques of compression and the groups of modules that they are for, as plain values.

Read from the section `compression_training` of a config, as plain dicts with all defaults filled in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.masks import Kind
from mpispeed.nn.compression.quantizers import Quantizer

WEIGHTS, ACTIVATIONS = "weight_quantization", "activation_quantization"
PRUNINGS: dict[str, Kind] = {
    "sparse_pruning": "sparse", "row_pruning": "row", "head_pruning": "head", "channel_pruning": "channel",
}  # fmt: skip
"""Sections of pruning in the order in which masks are laid on."""

_PLAIN = Quantizer()


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """Weights of few bits.

    Attributes:
        start_bits, target_bits, period: bits at first and in the end, and steps until the first is lost.
        quantizer: how; groups are those of the config, an embedding has one for each row.
        offset: first step.
        in_forward: target bits from the first step on; else the number falls along a schedule.
        change_ratio: how much of the plain values is lost at each step (`fp16_mixed_quantize`); None: none is kept.
        verbose: tell when bits fall.
    """

    start_bits: int
    target_bits: int
    period: int = 1
    quantizer: Quantizer = _PLAIN
    offset: int = 0
    in_forward: bool = True
    change_ratio: float | None = None
    verbose: bool = False
    method: str = WEIGHTS


@dataclass(frozen=True, slots=True)
class ActivationQuantization:
    """Inputs of few bits.

    Attributes:
        bits: of a value.
        quantizer: how; it has a scale for each token or image, or one where ranges are static.
        is_static: the range is a running one of training batches; else that of the tensor itself.
        offset: first step.
    """

    bits: int
    quantizer: Quantizer = _PLAIN
    is_static: bool = True
    offset: int = 0
    method: str = ACTIVATIONS


@dataclass(frozen=True, slots=True)
class Pruning:
    """Weights, rows, heads or channels that become zero.

    Attributes:
        kind: what goes.
        scores: "l1", "topk" or "snip_momentum".
        dense_ratio: part that is kept.
        offset, offset_end: first step; last one of snip_momentum's ramp.
        num_heads: of head pruning.
        block_pattern, stride: of snip_momentum.
    """

    kind: Kind
    dense_ratio: float
    scores: Literal["l1", "topk", "snip_momentum"] = "l1"
    offset: int = 0
    offset_end: int | None = None
    num_heads: int = 0
    block_pattern: str = "4x1"
    stride: int = 1

    @property
    def method(self) -> str:
        """The section of the config."""
        return f"{self.kind}_pruning"

    @property
    def is_learned(self) -> bool:
        """True if scores are parameters."""
        return self.scores == "topk"


Technique = WeightQuantization | ActivationQuantization | Pruning


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that one technique is for.

    Attributes:
        name: in the config.
        technique: what is done to them.
        modules: regular expressions, looked for in names of modules; "*" is all.
        related: for each of `modules` those of modules which follow it and shrink with it; empty for none.
        excluded: regular expressions of modules that are left alone.
    """

    name: str
    technique: Technique
    modules: tuple[str, ...] = ("*",)
    related: tuple[tuple[str, ...], ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Where it stands in the config, for messages."""
        return f"compression_training.{self.technique.method}.different_groups.{self.name}"


def read_groups(section: Mapping[str, Any]) -> list[Group]:
    """The groups of all techniques that are enabled, in the order in which they are applied.

    Args:
        section: `compression_training` as plain values, complete.

    Raises:
        ConfigError: values that cannot hold.
    """
    found: list[Group] = []
    for method, make in ((WEIGHTS, _weights), (ACTIVATIONS, _activations), *((name, _pruning) for name in PRUNINGS)):
        values = section.get(method) or {}
        shared = values.get("shared_parameters") or {}
        if not shared.get("enabled"):
            continue
        groups: Mapping[str, Any] = values.get("different_groups") or {}
        if not groups and shared.get("method") == "snip_momentum":
            groups = {"all": {"params": {}}}
        for name, group in groups.items():
            technique = make(method, {**shared, **group["params"]}, f"compression_training.{method}", name)
            excluded = tuple(shared.get("excluded_modules") or ())
            found.append(
                Group(name, technique, tuple(group.get("modules") or ("*",)), _related(method, name, group), excluded)
            )
    return found


def _weights(method: str, values: Mapping[str, Any], path: str, name: str) -> Technique:
    start, target = values["start_bits"], values["target_bits"]
    quantizer = Quantizer(values["quantization_type"], values["rounding"], values["quantize_groups"])
    in_forward = values["quantize_weight_in_forward"]
    for key, bits in (("target_bits", target), *(() if in_forward else (("start_bits", start),))):
        _check_bits(f"{path}.different_groups.{name}.params.{key}", bits, replace(quantizer, groups=1))
    mixed = values.get("fp16_mixed_quantize") or {}
    ratio = mixed["quantize_change_ratio"] if mixed.get("enabled") else None
    verbose = values.get("quantize_verbose", False)
    # Scripts of DeepSpeedExamples have a period of 0 where bits do not fall.
    offset, period = values["schedule_offset"], max(1, values["quantization_period"])
    return WeightQuantization(start, target, period, quantizer, offset, in_forward, ratio, verbose)


def _activations(method: str, values: Mapping[str, Any], path: str, name: str) -> Technique:
    quantizer = Quantizer(values["quantization_type"])
    here = f"{path}.different_groups.{name}.params.bits"
    _check_bits(here, values["bits"], quantizer)
    if values["bits"] <= 2:
        msg = f"{here}: {values['bits']}; activations have at least 3 bits"
        raise ConfigError(msg)
    return ActivationQuantization(
        values["bits"], quantizer, values["range_calibration"] == "static", values["schedule_offset"]
    )


def _pruning(method: str, values: Mapping[str, Any], path: str, name: str) -> Technique:
    return Pruning(
        PRUNINGS[method],
        values["dense_ratio"],
        values["method"],
        values["schedule_offset"],
        values.get("schedule_offset_end"),
        values.get("num_heads") or 0,
        values.get("block_pattern", "4x1"),
        values.get("schedule_offset_stride", 1),
    )


def _check_bits(path: str, bits: int, quantizer: Quantizer) -> None:
    reason = quantizer.reason_against(bits, ())
    if reason:
        msg = f"{path}: {reason}"
        raise ConfigError(msg)


def _related(method: str, name: str, group: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    related = cast("list[list[str]]", group.get("related_modules") or [])
    modules = group.get("modules") or ["*"]
    if related and len(related) != len(modules):
        msg = (
            f"compression_training.{method}.different_groups.{name}.related_modules: {len(related)} lists for "
            f"{len(modules)} entries of modules; give one list for each"
        )
        raise ConfigError(msg)
    return tuple(tuple(names) for names in related)


def by_method(groups: list[Group]) -> Iterator[tuple[str, list[Group]]]:
    """The groups of each method that has any."""
    for method in (WEIGHTS, ACTIVATIONS, *PRUNINGS):
        own = [group for group in groups if group.technique.method == method]
        if own:
            yield method, own
