"""The settings of DeepSpeedExamples' BERT scripts (in model_compression/bert) for a BERT of any number of heads.

Their bits, ratios, modules and related modules; ranges of steps are parts of the run, as theirs of two epochs of MNLI.
Blocks are those of DeepSpeed's documentation.
"""

from __future__ import annotations

import copy
from typing import Any

ENCODER = ["attention.self", "output.dense", "intermediate"]
START = 2000 / 24_544
"""Part of a run before pruning begins: schedule_offset of two epochs of MNLI, in batches of 32."""

_FORWARD = {"quantize_weight_in_forward": True, "quantization_type": "symmetric", "rounding": "nearest"}


def _weights(groups: int, *bits: tuple[int, list[str]]) -> dict[str, Any]:
    return {
        "weight_quantization": {
            "shared_parameters": {"enabled": True, "quantize_groups": groups, **_FORWARD},
            "different_groups": {
                f"wq{number}": {
                    "params": {"start_bits": each, "target_bits": each, "quantization_period": 0},
                    "modules": modules,
                }
                for number, (each, modules) in enumerate(bits, 1)
            },
        }
    }


def _inputs(*bits: tuple[int, list[str]], ranges: str = "dynamic") -> dict[str, Any]:
    shared = {"enabled": True, "quantization_type": "symmetric", "range_calibration": ranges, "schedule_offset": 0}
    return {
        "activation_quantization": {
            "shared_parameters": shared,
            "different_groups": {
                f"aq{number}": {"params": {"bits": each}, "modules": modules}
                for number, (each, modules) in enumerate(bits, 1)
            },
        }
    }


def _pruned(kind: str, method: str, ratio: float, modules: list[str], related: list[str] | None = None) -> Any:
    group: dict[str, Any] = {"params": {"dense_ratio": ratio}, "modules": modules}
    if related:
        group["related_modules"] = [related]
    shared = {"enabled": True, "method": method}
    return {f"{kind}_pruning": {"shared_parameters": shared, "different_groups": {"p1": group}}}


def _blocks(pattern: str, ratio: float) -> dict[str, Any]:
    shared = {"enabled": True, "method": "snip_momentum", "block_pattern": pattern, "dense_ratio": ratio}
    return {"sparse_pruning": {"shared_parameters": shared | {"excluded_modules": ["classifier", "pooler"]}}}


_EMBEDDED = [*ENCODER, "word_embeddings"]
TECHNIQUES: dict[str, dict[str, Any]] = {
    "weights, 8 bits": _weights(48, (8, _EMBEDDED)),
    "weights, 4 and 2 bits": _weights(
        64, (4, ["attention.self", "word_embeddings"]), (2, ["output.dense", "intermediate"])
    ),
    "inputs, 8 and 4 bits": _inputs((8, ["attention.self"]), (4, ["output.dense", "intermediate"])),
    "inputs, 8 bits, static ranges": _inputs((8, ENCODER), ranges="static"),
    "ZeroQuant, weights and inputs of 8 bits": _weights(48, (8, _EMBEDDED)) | _inputs((8, ENCODER)),
    "sparse, 40 % kept": _pruned("sparse", "l1", 0.4, ENCODER),
    "sparse, blocks of 4x1, 40 % kept": _blocks("4x1", 0.4),
    "sparse, 2 of 4 kept": _blocks("2:4", 0.5),
    "rows, 60 % kept": _pruned("row", "topk", 0.6, ["intermediate.dense"], [r"layer.\w+.output.dense"]),
    "heads, 60 % kept": _pruned(
        "head", "topk", 0.6, ["attention.output.dense"], ["self.query", "self.key", "self.value"]
    ),
}
"""Name -> section, without offsets and heads. Groups of 48 and 64 are for BERT's 768; see `section_of`."""
EXTREME = {"XTC, weights of 1 bit, inputs of 8 bits": _weights(1, (1, _EMBEDDED)) | _inputs((8, ENCODER))}
"""Those that cost accuracy; XTC has 18 epochs for it, and a teacher."""


MIXED = {"MoQ, weights of 12 bits falling to 8": _weights(1, (12, _EMBEDDED))}
"""Those for training in 16 bits: a mixture of quantization, with DeepSpeed's bits."""


def section_of(name: str, steps: int, heads: int, groups: int | None = None) -> dict[str, Any]:
    """`compression_training` for a technique in a run of `steps`.

    Args:
        groups: of each quantized weight, instead of the scripts'.
    """
    section = copy.deepcopy((TECHNIQUES | EXTREME | MIXED)[name])
    for method, values in section.items():
        shared = values["shared_parameters"]
        if name in MIXED:  # bits fall after 1, 2, 4 and 8 periods
            shared["quantize_weight_in_forward"] = False
            values["different_groups"]["wq1"]["params"] |= {"target_bits": 8, "quantization_period": steps // 16}
        if method.endswith("pruning"):
            shared["schedule_offset"] = round(START * steps)
        if shared.get("method") == "snip_momentum":
            shared |= {"schedule_offset_end": steps // 2, "schedule_offset_stride": max(1, steps // 50)}
        if method == "head_pruning":
            shared["num_heads"] = heads
        if groups and "quantize_groups" in shared:
            shared["quantize_groups"] = groups
    return section
