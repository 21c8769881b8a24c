"""Small models whose layers drop tokens, without an engine and with one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from mpispeed.nn.routing import RandomLTDScheduler, convert_to_random_ltd
from mpispeed.nn.routing.convert import numbered, routes_of
from mpispeed.nn.routing.token_drop import DropSettings


def section(layers: int, numbers: list[int], least: int, most: int, **others: Any) -> dict[str, Any]:
    """The section `random_ltd` of a decoder whose hidden states are [B, S, H]."""
    growth = {"require_steps": 4, "seq_per_step": 1}
    return {
        "enabled": True,
        "total_layer_num": layers,
        "random_ltd_layer_num": len(numbers),
        "random_ltd_layer_id": numbers,
        "model_mask_name": None,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": least, "max_value": most, "schedule_type": "fixed_linear", "schedule_config": growth,
        },
        **others,
    }  # fmt: skip


def data_efficiency(layers: int, numbers: list[int], least: int, most: int, **others: Any) -> dict[str, Any]:
    """The section `data_efficiency` around it."""
    routing = {"enabled": True, "random_ltd": section(layers, numbers, least, most, **others)}
    return {"enabled": True, "data_routing": routing}


def drop_tokens(
    model: nn.Module, kind: type[nn.Module], config: dict[str, Any], *, step: int = 0, first: int = 0
) -> RandomLTDScheduler:
    """Let layers of a model drop tokens without an engine."""
    scheduler = RandomLTDScheduler({**copy.deepcopy(config), "global_batch_size": 4})
    settings = DropSettings.of(config, scheduler, place=lambda: (step, first))
    routes = routes_of(convert_to_random_ltd(model, kind))
    for name, number in numbered(routes, config["random_ltd_layer_id"]).items():
        routes[name].configure(name, number, settings)
    return scheduler


def kept_of(config: dict[str, Any], number: int, batch: int, tokens: int, *, step: int = 0) -> torch.Tensor:
    """The places that a layer keeps, [B, K]."""
    scheduler = RandomLTDScheduler({**config, "global_batch_size": 4})
    settings = DropSettings.of(config, scheduler, place=lambda: (step, 0))
    shape = (batch, tokens, 1) if settings.batch_first else (tokens, batch, 1)
    kept = settings.choose(number, torch.zeros(shape))
    assert kept is not None
    return kept.index.long()
