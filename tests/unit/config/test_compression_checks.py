"""Settings of compression that contradict each other, and those that are there."""

from __future__ import annotations

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.config import load, require_available

WEIGHTS = "compression_training.weight_quantization"


def techniques(**shared):
    """The section compression_training, each technique with one group; `shared` by technique."""
    params = {
        "weight_quantization": {"start_bits": 8, "target_bits": 4},
        "activation_quantization": {"bits": 8},
        **{f"{kind}_pruning": {"dense_ratio": 0.5} for kind in ("sparse", "row", "channel", "head")},
    }
    return {
        "compression_training": {
            name: {
                "shared_parameters": {"enabled": True, **more},
                "different_groups": {"g": {"params": params[name], "modules": ["*"]}},
            }
            for name, more in shared.items()
        }
    }


def bits_of_weights(start=8, target=4, **shared):
    """Settings that quantize weights."""
    made = techniques(weight_quantization=shared)
    made["compression_training"]["weight_quantization"]["different_groups"]["g"]["params"] = {
        "start_bits": start, "target_bits": target
    }  # fmt: skip
    return made


CONFLICTS = {
    f"{WEIGHTS}.shared_parameters.quantize_weight_in_forward": bits_of_weights(),
    f"{WEIGHTS}.different_groups.g.params.start_bits": {**bits_of_weights(4, 8), "fp16": True},
    f"{WEIGHTS}.different_groups.g.params.target_bits": {
        **bits_of_weights(8, 2, rounding="stochastic"), "fp16": True
    },
    f"{WEIGHTS}.shared_parameters.fp16_mixed_quantize.quantize_change_ratio": {
        **bits_of_weights(fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0}), "fp16": True
    },
    "quantize_training.fp16_mixed_quantize.quantize_change_ratio": {
        "quantize_training": {"enabled": True, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.0}}
    },
    "quantize_training": {**bits_of_weights(), "fp16": True, "quantize_training": True},
    "quantize_training.quantize_bits.target_bits": {
        "fp16": True, "quantize_training": {
            "enabled": True, "quantize_bits": {"target_bits": 1}, "quantize_algo": {"q_type": "asymmetric"}
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("path", CONFLICTS)
def test_conflicts_name_the_key(path):
    with pytest.raises(ConfigError, match=rf"(^configuration: |\n  ){path}: "):
        load(CONFLICTS[path])


def test_compression_is_available():
    every = techniques(
        weight_quantization={}, activation_quantization={}, sparse_pruning={}, row_pruning={},
        head_pruning={"num_heads": 4}, channel_pruning={},
    )  # fmt: skip
    for settings in (
        every | {"fp16": True},
        every | {"bf16": True},
        techniques(weight_quantization={"quantize_weight_in_forward": True}),
        {"quantize_training": True, "fp16": True},
    ):
        assert load(settings).warnings == []
        require_available(load(settings).config)


def test_the_older_section_is_weight_quantization_of_all_layers():
    old = {"enabled": True, "quantize_bits": {"start_bits": 12}, "quantize_schedule": {"schedule_offset": 7}}
    old |= {"quantize-algo": {"q_type": "asymmetric"}, "fp16_mixed_quantize": {"enabled": True}}
    found = load({"quantize_training": old}).config.quantize_training.technique
    (group,) = found.different_groups.values()
    assert group.modules == ["*"]
    assert group.params.model_dump() == {"start_bits": 12, "target_bits": 8, "quantization_period": 100}
    shared = found.shared_parameters
    assert (shared.schedule_offset, shared.quantization_type, shared.rounding) == (7, "asymmetric", "nearest")
    assert shared.fp16_mixed_quantize.enabled and not shared.quantize_weight_in_forward
