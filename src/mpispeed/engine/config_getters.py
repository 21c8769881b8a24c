"""DeepSpeed's getters of an engine that only repeat the config: tables from method name to path of a setting."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpispeed.config.root import Config

_FLOPS = ("enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file")
_TUNING = ("enabled", "start_profile_step", "end_profile_step", "metric", "metric_path", "model_info_path")
_EIGENVALUE = (
    "enabled", "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name", "layer_num",
)  # fmt: skip

PATHS: dict[str, str] = {
    "dataloader_drop_last": "dataloader_drop_last",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "graph_harvesting": "graph_harvesting",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "pld_enabled": "progressive_layer_drop.enabled",
    "pld_params": "progressive_layer_drop",
    "pld_theta": "progressive_layer_drop.theta",
    "pld_gamma": "progressive_layer_drop.gamma",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "curriculum_params_legacy": "curriculum_learning",
    "curriculum_learning_enabled": "data_efficiency.data_sampling.curriculum_learning.enabled",
    "curriculum_learning_config": "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "data_efficiency_config": "data_efficiency",
    "data_sampling_enabled": "data_efficiency.data_sampling.enabled",
    "data_sampling_config": "data_efficiency.data_sampling",
    "random_ltd_enabled": "data_efficiency.data_routing.random_ltd.enabled",
    "random_ltd_config": "data_efficiency.data_routing.random_ltd",
    "quantize_training": "quantize_training",
    "amp_params": "amp",
    **{f"flops_profiler_{key}": f"flops_profiler.{key}" for key in _FLOPS},
    **{f"autotuning_{key}": f"autotuning.{key}" for key in _TUNING},
    "autotuning_profile_model_info": "autotuning.model_info.profile",
    **{f"eigenvalue_{key}": f"eigenvalue.{key}" for key in _EIGENVALUE},
}
"""Method -> setting; a section is returned as a plain dict. A section that is absent: False for a switch, else None."""

REFUSED: dict[str, str] = {
    "set_custom_curriculum_learning_schedule": "curriculum learning is",
    "random_ltd_initialize": "dropping of tokens in random layers (random_ltd) is",
}
"""Method -> the feature that is not there."""


def read(config: Config, path: str) -> Any:
    """The setting at a path."""
    steps = path.split(".")
    found: Any = reduce(lambda section, key: None if section is None else getattr(section, key), steps, config)
    if found is None and path.endswith(".profile"):
        return False
    return found.model_dump() if hasattr(found, "model_dump") else found
