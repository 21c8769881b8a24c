"""Floor 5: model states cut over data-parallel ranks. One code path; what differs is a row of placements.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC20.
Knows stores, meshes and update rules. Must not know the config, the engine, or ZeRO's numbered levels.

The public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpispeed.base import late

if TYPE_CHECKING:
    from mpispeed.zero.access import (
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
    from mpispeed.zero.estimate import (
        estimate_zero2_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
    from mpispeed.zero.external import register_external_parameter, unregister_external_parameter
    from mpispeed.zero.gathered import GatheredParameters, empty_partition_cache, unwrap_model_for_generation
    from mpispeed.zero.init import Init
    from mpispeed.zero.kinds import OffloadStateTypeEnum
    from mpispeed.zero.leaf import (
        get_z3_leaf_modules,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
        z3_leaf_parameter,
    )
    from mpispeed.zero.uneven import uneven_forwards

    TiledLinear: Any
    TiledLinearReturnBias: Any

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
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
    "set_z3_leaf_modules",
    "uneven_forwards",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

_HOME = {
    "Init": "init",
    "OffloadStateTypeEnum": "kinds",
    "GatheredParameters": "gathered",
    "empty_partition_cache": "gathered",
    "unwrap_model_for_generation": "gathered",
    "register_external_parameter": "external",
    "unregister_external_parameter": "external",
    "uneven_forwards": "uneven",
}
_ABOVE = ("TiledLinear", "TiledLinearReturnBias")
"""Names of higher floors that stand here for people who know them from here."""


def _home_of(name: str) -> str:
    if name.startswith("estimate_"):
        return "estimate"
    return _HOME.get(name) or ("leaf" if "z3_leaf" in name else "access")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        msg = f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        raise AttributeError(msg)
    if name in _ABOVE:
        found = late.find(name)
    else:
        found = getattr(importlib.import_module(f"{__name__}.{_home_of(name)}"), name)
    globals()[name] = found
    return found
