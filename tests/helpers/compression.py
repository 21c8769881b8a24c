"""Sections `compression_training` for the GPT of the examples, and plain computations to compare with."""

from __future__ import annotations

from typing import Any

from tests.helpers.pipes import gpt
from tests.helpers.steady_gpt import SteadyGPT, byte_batches
from tests.zoo.training import ADAM, config

SHAPE = gpt.Shape(layers=2, heads=2, width=16, block=8)
BATCH = 24


def technique(modules: list[str], params: dict[str, Any], related: Any = None, **shared: Any) -> dict[str, Any]:
    """A technique with one group, on from the first step."""
    group: dict[str, Any] = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"g": group}}


def bits(start: int, target: int, period: int = 1, modules: list[str] | None = None, **shared: Any) -> dict[str, Any]:
    """Weight quantization, by default of all layers of blocks."""
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    return {"weight_quantization": technique(modules or ["attention", "mlp"], params, **shared)}


IN_FORWARD = bits(4, 4, quantize_weight_in_forward=True, quantize_groups=4, quantization_type="asymmetric")
STOCHASTIC = bits(4, 4, quantize_weight_in_forward=True, rounding="stochastic")
DYNAMIC = {
    "activation_quantization": technique(
        ["mlp"], {"bits": 4}, range_calibration="dynamic", quantization_type="asymmetric"
    )
}
STATIC = {"activation_quantization": technique(["mlp"], {"bits": 8}, range_calibration="static")}
SPARSE = {"sparse_pruning": technique(["attention"], {"dense_ratio": 0.5}, method="l1", schedule_offset=1)}
ROWS = {"row_pruning": technique([r"mlp\.0"], {"dense_ratio": 0.5}, [[r"mlp\.2"]], method="topk")}
HEADS = {"head_pruning": technique([r"attention\.out"], {"dense_ratio": 0.5}, method="topk", num_heads=2)}
ALL = IN_FORWARD | DYNAMIC | SPARSE | ROWS | HEADS
IN_PAIRS = {
    **bits(8, 8, quantize_weight_in_forward=True),
    "activation_quantization": technique([r"attention\.", r"mlp\.\d$"], {"bits": 8}, range_calibration="static"),
    "row_pruning": technique([r"mlp\.0$"], {"dense_ratio": 0.5}, [[r"mlp\.2$"]], method="topk"),
}
"""In the table of all pairs of features."""


def settings(section: dict[str, Any], stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Settings of an engine."""
    given = {**ADAM, "reduction": "ordered", "compression_training": section, **more}
    return config(stage, BATCH, accumulation, **given)


def model(recompute: Any = None) -> SteadyGPT:
    """Always with the same weights."""
    return SteadyGPT(SHAPE, recompute)


def batches(count: int) -> list[Any]:
    """Global batches of bytes and the next ones."""
    return byte_batches(count, BATCH, SHAPE.block)
