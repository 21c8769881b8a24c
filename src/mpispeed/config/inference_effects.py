"""Settings of `init_inference` that do nothing, always or beside others: one sentence for each that is given.

Delete a row when its key gets an effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpispeed.config.inference import FORWARDED, InferenceConfig

_TRITON = "no kernel here is one of Triton; replace_with_kernel_inject chooses those that are there"
_COUNTED = "layers of experts and their kinds are found in the model"
_NEIGHBOURS = "neighbours on the data axis share experts out, as many as moe.ep_size says"
_FUSED = "it is for fused layers, and replace_with_kernel_inject is false"

# Path -> why.
NO_EFFECT: dict[str, str] = {
    "enable_cuda_graph": "no graphs are captured; every call runs anew, with the same results",
    "use_triton": _TRITON,
    "triton_autotune": _TRITON,
    "moe.moe_experts": _COUNTED,
    "moe.type": _COUNTED,
    "moe.ep_group": _NEIGHBOURS,
    "moe.ep_mp_group": _NEIGHBOURS,
    "return_tuple": "a layer returns what its model takes, fused or not",
    "training_mp_size": "weights are read at any number of ranks, whatever number wrote them",
    "replace_method": "there is one way to choose layers",
    "transposed_mode": "layers tell themselves which way their weights lie",
}


def _is_fused(config: InferenceConfig) -> bool:
    return config.replace_with_kernel_inject


def _is_integer(config: InferenceConfig) -> bool:
    return bool(config.dtype == torch.int8)


def _has_codes(config: InferenceConfig) -> bool:
    weight = config.quant.weight
    return _is_integer(config) or bool(weight.post_init_quant or weight.quantized_initialization)


_CODES = tuple(f"quant.weight.{key}" for key in ("num_bits", "q_type", "q_groups", "mlp_extra_grouping"))
# Path -> whether the settings give the key its effect, and why it has none without them.
DEPENDENT: dict[str, tuple[Callable[[InferenceConfig], bool], str]] = {
    "triangular_masking": (_is_fused, _FUSED),
    "zero": (
        lambda config: config.streams_parameters,
        "only stage 3 shards parameters, and there is nothing else here",
    ),
    "base_dir": (lambda config: config.checkpoint is not None, "no checkpoint is given"),
    **dict.fromkeys((*_CODES, "quant.qkv"), (_is_integer, "it is for dtype int8")),
    **dict.fromkeys(("quant.enabled", "quant.weight.enabled"), (_has_codes, "no weights are asked to be integers")),
}


def find_sentences(config: InferenceConfig) -> list[str]:
    """A sentence for each key that is given and deprecated, or differs from its default and has no effect."""
    old = [key for key in FORWARDED if key in config.model_fields_set]
    said = [f"{key} is deprecated; use {FORWARDED[key]}" for key in old]
    rows = [*NO_EFFECT.items(), *((path, why) for path, (works, why) in DEPENDENT.items() if not works(config))]
    return said + [f"{path} has no effect here: {why}" for path, why in rows if _differs(config, path.split("."))]


def _differs(section: Any, keys: list[str]) -> bool:
    """True if the value at a path below `section` is not its default."""
    for key in keys[:-1]:
        section = getattr(section, key)
    info = type(section).model_fields[keys[-1]]
    return bool(getattr(section, keys[-1]) != info.get_default(call_default_factory=True))
