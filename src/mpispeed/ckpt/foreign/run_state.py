"""Counters, schedules and other state that a DeepSpeed engine saves beside tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mpispeed.base.plain import hide_secrets
from mpispeed.ckpt.foreign.found import Found
from mpispeed.ckpt.foreign.matching import number
from mpispeed.ckpt.foreign.pickles import Inert

#: keys of the engine's own in a file with weights; all others are the user's
RESERVED = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "csr_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "micro_steps", "dp_world_size",
    "mp_world_size", "num_experts", "ds_config", "ds_version", "ds_autoep_layers", "autoep_layers",
})  # fmt: skip


def take_run(found: Found, model: Mapping[str, Any]) -> None:
    """Add counters, schedule, configuration and the user's own entries from a file with weights."""
    for key in ("global_steps", "global_samples", "skipped_steps"):
        found.counters[key] = int(number(model.get(key)) or 0)
    config = model.get("ds_config")
    if isinstance(config, dict):
        found.config_json = json.dumps(hide_secrets(config), default=str)
        kind = (config.get("optimizer") or {}).get("type")
        found.rule = str(kind) if kind else ""
        if not found.counters["global_samples"]:
            batch = number(config.get("train_batch_size")) or 0
            found.counters["global_samples"] = found.counters["global_steps"] * int(batch)
    scheduler = model.get("lr_scheduler")
    found.lr_scheduler = scheduler if isinstance(scheduler, dict) else None
    found.layout = {"data": int(number(model.get("dp_world_size")) or 1)}
    found.left_out += [f"state of {key}" for key in ("data_sampler", "random_ltd") if model.get(key)]
    found.client = {str(key): value for key, value in model.items() if key not in RESERVED}


def take_loss_scale(found: Found, optimizer: Mapping[str, Any]) -> None:
    """Add the loss scale from an optimizer's state: an object of its own, or plain numbers."""
    scaler = optimizer.get("loss_scaler")
    fields: Mapping[str, Any] = scaler.fields if isinstance(scaler, Inert) else optimizer
    scale = number(fields.get("cur_scale", fields.get("loss_scale")))
    if scale is None:
        return
    is_dynamic = number(optimizer.get("dynamic_loss_scale"))
    if is_dynamic is None:
        is_dynamic = "last_overflow_iter" in fields
    done = int(number(fields.get("cur_iter")) or 0)
    state: dict[str, Any] = {"dynamic_loss_scale": bool(is_dynamic), "cur_scale": float(scale), "cur_iter": done}
    if is_dynamic:
        last, credit = number(fields.get("last_overflow_iter")), number(fields.get("cur_hysteresis"))
        state["last_overflow_iter"] = -1 if last is None else int(last)
        state["credit"] = 1 if credit is None else int(credit)
    found.counters["loss_scaler"] = state
