"""Sharded model states: construction, reading and changes, with DeepSpeed's names."""

from mpispeed.base.errors import ZeRORuntimeException
from mpispeed.compat.estimate import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from mpispeed.compat.tiling import TiledLinear, TiledLinearReturnBias
from mpispeed.compat.zero_init import Init, MiCS_Init
from mpispeed.sharding.access import (
    get_full_fp32_params,
    get_full_grads,
    get_full_optimizer_states,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from mpispeed.sharding.external import register_external_parameter, unregister_external_parameter
from mpispeed.sharding.gathered import GatheredParameters, empty_partition_cache, unwrap_model_for_generation
from mpispeed.sharding.grad_updates import safe_update_full_grad_vectorized
from mpispeed.sharding.leaf import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from mpispeed.sharding.module_hooks import uneven_forwards
from mpispeed.sharding.param_facts import ZeroParamStatus
from mpispeed.sharding.param_shards import OffloadStateTypeEnum

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeRORuntimeException",
    "ZeroParamStatus",
    "empty_partition_cache",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "get_full_fp32_params",
    "get_full_grads",
    "get_full_optimizer_states",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "uneven_forwards",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
