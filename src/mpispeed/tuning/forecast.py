"""Predictions for many settings of one model: what a rank would hold and send in a step, as `mpispeed plan` says it.

`survey` runs on a rank of the worker job, with the model that the script gave to `initialize`; nothing is allocated or
sent, and the model stays as it is.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.cgroups import machine_limits
from mpispeed.base.device import HOST
from mpispeed.base.errors import MpispeedError
from mpispeed.config.derive import ranks_per_model
from mpispeed.config.load import validate
from mpispeed.config.unavailable import require_available
from mpispeed.engine.estimate.stages import examine_rank
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding import sharded_param
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.root import Config
    from mpispeed.engine.estimate.budget import Budget
    from mpispeed.plan.plan import Plan


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and traffic of the first rank in one optimizer step. Units: bytes.

    Attributes:
        refusal: why these settings cannot be; "" if they can, and all else is empty if not.
        held: model states by tier ("device", "host", "nvme"), without activations.
        build_bytes: peak while the engine takes the model over.
        calls: of verbs, by name.
        sent: bytes by verb.
        moved: bytes between tiers, by "from > to".
        updated: bytes of masters and optimizer states that an update goes through.
        micro_batch: samples of a forward pass.
        micro_steps: forward passes of a step.
        train_batch: samples of a step, over all ranks.
        is_overlapped: gradients are summed while the backward pass runs.
    """

    refusal: str = ""
    held: Mapping[str, int] = field(default_factory=dict)
    build_bytes: int = 0
    calls: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, int] = field(default_factory=dict)
    updated: int = 0
    micro_batch: int = 0
    micro_steps: int = 0
    train_batch: int = 0
    is_overlapped: bool = False

    @property
    def memory_bytes(self) -> int:
        """States in memory."""
        return sum(size for tier, size in self.held.items() if tier != Tier.NVME.value)


@dataclass(frozen=True)
class Survey:
    """A model and a machine, and a forecast for each candidate. Units: bytes.

    Attributes:
        forecasts: in the order of the candidates.
        model: facts: num_params, trainable_num_params, hidden_size, num_layers (0 where there is none).
        ranks: of the job.
        ranks_per_node: on this node.
        limits: what is left of the memory of this node, by what limits it.
        device: "cpu", or the kind of the accelerator.
        device_bytes: memory of the accelerator; 0 without one.
    """

    forecasts: Sequence[Forecast]
    model: Mapping[str, int]
    ranks: int
    ranks_per_node: int
    limits: Mapping[str, int]
    device: str = "cpu"
    device_bytes: int = 0

    def as_values(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Survey:
        """From what `as_values` gave."""
        return cls(**{**values, "forecasts": [Forecast(**one) for one in values["forecasts"]]})


def survey(
    candidates: Sequence[Mapping[str, Any]],
    model: nn.Module,
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    device: torch.device = HOST,
) -> dict[str, Any]:
    """Predict every candidate for a model; a candidate that cannot be has a sentence. Local.

    Args:
        candidates: settings, each as the content of a config file.
        model: what an engine would take; it stays as it is.
        ranks: of the job.
        ranks_per_node: on this node; None: all.
        device: of this rank.

    Returns:
        `Survey.as_values()`.
    """
    node = ranks_per_node or ranks
    shapes = _Shapes(model)
    return Survey(
        [_forecast(config, shapes, ranks, node) for config in candidates],
        describe(model),
        ranks,
        node,
        {limit.source: limit.bytes for limit in machine_limits()},
        device.type,
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
    ).as_values()


def describe(model: nn.Module) -> dict[str, int]:
    """Facts about a model; its width is the commonest last dim of its matrices, its depth its longest row of blocks."""
    params = list(model.parameters())
    widths: dict[int, int] = {}
    for param in params:
        shape = param.shape
        if len(shape) > 1:
            widths[shape[-1]] = widths.get(shape[-1], 0) + 1
    rows = [len(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return {
        "num_params": sum(math.prod(param.shape) for param in params),
        "trainable_num_params": sum(math.prod(param.shape) for param in params if param.requires_grad),
        "hidden_size": max(widths, key=lambda width: (widths[width], width), default=0),
        "num_layers": max(rows, default=0),
    }


class _Shapes:
    """A model without memory, in copies for settings that change it."""

    def __init__(self, model: nn.Module) -> None:
        self.is_init_sharded = any(sharded_param.is_sharded(param) for param in model.parameters())
        self.is_stage = isinstance(model, PipelineModule)
        # Of these, copies would not be what the script has: they are looked at as they are, and not changed.
        self._model = model if self.is_init_sharded or self.is_stage else _on_meta(model)
        self.is_copy = self._model is not model

    def model_for(self, config: Config) -> nn.Module:
        """The model, or a copy of it that may be changed."""
        if self.is_copy and (config.expert_parallel.enabled or (ranks_per_model(config) > 1)):
            return copy.deepcopy(self._model)
        return self._model


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy without memory, tied parameters tied; the model itself where it cannot be copied."""
    memo: dict[int, Any] = {}
    for param in model.parameters():
        empty = torch.nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
        memo[id(param)] = empty
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # whatever a user's module keeps: a lock, a file, a group of ranks
        return model


def _forecast(source: Mapping[str, Any], shapes: _Shapes, ranks: int, node: int) -> Forecast:
    try:
        config = validate(source, "candidate").config  # not what the worker lays over the settings of its script
        require_available(config, "candidate")
        if ranks_per_model(config) > 1 and not shapes.is_copy and not shapes.is_stage:
            return Forecast(
                "this model cannot be copied, so that its slices cannot be predicted; leave lists of them out"
            )
        model = shapes.model_for(config)
        plan, found = examine_rank(
            config, ranks, 0 if ranks % node else node, 0, model, None,
            in_scope=shapes.is_init_sharded, sequence_length=0,
        )  # fmt: skip
    except MpispeedError as error:
        return Forecast(" ".join(str(error).split()))
    return _of_budget(plan, found.budget)


def _of_budget(plan: Plan, budget: Budget) -> Forecast:
    calls: dict[str, int] = {}
    for row in budget.sent:
        calls[row.verb] = calls.get(row.verb, 0) + row.messages
    moved: dict[str, int] = {}
    for one in budget.moved:
        key = f"{one.source.value} > {one.target.value}"
        moved[key] = moved.get(key, 0) + one.bytes
    return Forecast(
        held={tier.value: size for tier in Tier if (size := budget.tier_bytes(tier))},
        build_bytes=budget.build_bytes,
        calls=calls,
        sent={verb: budget.sent_bytes(verb) for verb in calls},
        moved=moved,
        updated=budget.bytes_of("masters") + budget.bytes_of("optimizer state") or budget.bytes_of("parameters"),
        micro_batch=plan.batch.micro_batch_size,
        micro_steps=plan.batch.gradient_accumulation_steps,
        train_batch=plan.batch.train_batch_size,
        is_overlapped=plan.is_overlapped,
    )
