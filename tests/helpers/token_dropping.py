"""Small models whose layers drop tokens, without an engine and with one, and plain training to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpispeed.nn.routing import RandomLTDScheduler, convert_to_random_ltd
from mpispeed.nn.routing.convert import dropping_layers, routes_of
from mpispeed.nn.routing.token_drop import DropSettings
from tests.helpers.pipes import gpt, gpt_layers
from tests.helpers.steady_gpt import SteadyGPT, byte_batches
from tests.zoo.training import ADAM, config

SHAPE = gpt.Shape(layers=4, heads=2, width=16, block=12)
BATCH, LEAST, LAYERS = 24, 4, [1, 2]


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
    model: nn.Module,
    kind: type[nn.Module],
    config: dict[str, Any],
    *,
    step: int = 0,
    place: Callable[[], tuple[int, int]] | None = None,
) -> RandomLTDScheduler:
    """Let layers of a model drop tokens without an engine."""
    scheduler = RandomLTDScheduler({**copy.deepcopy(config), "global_batch_size": BATCH})
    settings = DropSettings.of(config, scheduler, place=place or (lambda: (step, 0)))
    routes = routes_of(convert_to_random_ltd(model, kind))
    for name, place in dropping_layers(routes, config["random_ltd_layer_id"]).items():
        routes[name].configure(name, place, settings)
    return scheduler


def kept_of(config: dict[str, Any], number: int, batch: int, tokens: int, *, step: int = 0) -> torch.Tensor:
    """The places that a layer keeps, [B, K]."""
    scheduler = RandomLTDScheduler({**config, "global_batch_size": 4})
    settings = DropSettings.of(config, scheduler, place=lambda: (step, 0))
    shape = (batch, tokens, 1) if settings.batch_first else (tokens, batch, 1)
    kept = settings.choose(sorted(config["random_ltd_layer_id"]).index(number), torch.zeros(shape))
    assert kept is not None
    return kept.index.long()


# -- under an engine -------------------------------------------------------------------------------------------------


def steady(recompute: Any = None) -> SteadyGPT:
    """The model under an engine."""
    return SteadyGPT(SHAPE, recompute)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches of bytes and the next ones."""
    return byte_batches(count, BATCH, SHAPE.block)


def dropping(**others: Any) -> dict[str, Any]:
    """Lengths 4, 6, 8, 10, 12 of 12 tokens in the layers 1 and 2 of 4."""
    return section(SHAPE.layers, LAYERS, LEAST, SHAPE.block, token_inputs=["rotation"], **others)


def settings(stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """Settings of an engine whose layers drop tokens."""
    routing = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": dropping()}}
    return config(stage, BATCH, accumulation, **{**ADAM, "data_efficiency": routing, **more})


class Start(nn.Embedding):
    """Bytes to vectors, with the positions of their tokens."""

    def __init__(self) -> None:
        super().__init__(gpt.VOCABULARY, SHAPE.width)
        gpt.initialise(self, SHAPE)

    def forward(self, x: torch.Tensor) -> Any:
        """Hidden states and positions, [B, S, H] and [B, S]."""
        return super().forward(x), torch.arange(x.shape[1]).expand_as(x).contiguous()


class PlacedBlock(gpt_layers.PipeBlock):  # type: ignore[misc,name-defined]
    """A block of a pipeline that is given the positions of its tokens."""

    def forward(self, parts: Any) -> Any:
        """Hidden states and positions."""
        x, positions = parts
        return gpt.Block.forward(self, x, self.rotation[0][positions]), positions


class End(nn.Linear):
    """Vectors to scores of all bytes."""

    def __init__(self) -> None:
        super().__init__(SHAPE.width, gpt.VOCABULARY, bias=False)
        gpt.initialise(self, SHAPE)

    def forward(self, parts: Any) -> torch.Tensor:
        """Scores."""
        return super().forward(parts[0])


def train_plain(
    model: nn.Module, kind: type[nn.Module], data: list[Any], layers: list[int] = LAYERS, clip: float = 0.0
) -> list[float]:
    """Losses of plain torch on whole batches, with tokens dropped as an engine drops them."""
    now = {"step": 0}
    of_layers = {**dropping(), "random_ltd_layer_id": layers}
    scheduler = drop_tokens(model, kind, of_layers, place=lambda: (now["step"], 0))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for step, (x, y) in enumerate(data):
        now["step"] = step
        scheduler.update_seq(step)
        loss = model(x, y) if isinstance(model, SteadyGPT) else gpt_layers.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
