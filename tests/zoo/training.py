"""The builder of configs, training of engines, and plain torch on one process to compare them with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

import mpispeed
from mpispeed.sharding import sharded_param
from tests.zoo.models import BATCH, Net

Batch = torch.Tensor | tuple[torch.Tensor, ...]

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}
WARM = {
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-3}},
}
ORDERED = {**ADAM, "reduction": "ordered", "gradient_clipping": 0.5}


def config(
    stage: int = 0,
    batch: int = BATCH,
    accumulation: int | None = None,
    *,
    dtype: str = "fp32",
    zero: Mapping[str, Any] | None = None,
    reuse: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A DeepSpeed-style config without optimizer; those of `ADAM`, `SGD`, `WARM` and `ORDERED` are given as `**ADAM`.

    Args:
        stage: of zero_optimization; at stage 3 small units are cut too.
        batch: samples of a global batch.
        accumulation: micro-batches of a step.
        dtype: "bf16" and "fp16" enable their section.
        zero: more of the section zero_optimization.
        reuse: bounds how long units stay whole.
        more: other sections; one that is named above replaces it.
    """
    section = zero_section(stage, **(zero or {}))
    if reuse is not None:
        section["stage3_max_reuse_distance"] = reuse
    made: dict[str, Any] = {"train_batch_size": batch, "zero_optimization": section}
    if accumulation is not None:
        made["gradient_accumulation_steps"] = accumulation
    if dtype != "fp32":
        made[dtype] = {"enabled": True}
    return copy.deepcopy(made | more)


def zero_section(stage: int, **more: Any) -> dict[str, Any]:
    """The section for `stage`; at stage 3 no unit is so small that it stays whole."""
    return {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}) | more


def start(settings: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    """An engine of `mpispeed.initialize` around `model`, by default a fresh `Net`."""
    return mpispeed.initialize(model=Net() if model is None else model, config=settings, **more)[0]


def own_part(engine: Any, batch: Batch, micro: int = 0) -> tuple[torch.Tensor, ...]:
    """This rank's share of micro-batch `micro` of a global batch."""
    tensors = (batch,) if isinstance(batch, torch.Tensor) else batch
    mesh, accumulation = engine.mpispeed.parts.mesh, engine.gradient_accumulation_steps()
    rank, size = mesh.index("batch"), mesh["batch"].size
    count = tensors[0].shape[0] // (size * accumulation)
    first = (micro * size + rank) * count
    return tuple(tensor[first : first + count] for tensor in tensors)


def train(engine: Any, data: Iterable[Batch], **step: Any) -> list[float]:
    """Run global batches; returns this rank's loss of every step."""
    losses = []
    for batch in data:
        total = 0.0
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*own_part(engine, batch, micro))
            total += float(engine.backward(loss).detach())
            engine.step(**step)
        losses.append(total)
    return losses


def train_averaged(engine: Any, data: Iterable[Batch]) -> list[float]:
    """Run global batches; returns losses averaged over ranks."""
    data_axis, losses = engine.mpispeed.parts.mesh["data"], []
    for batch in data:
        total = torch.tensor(train(engine, [batch]), dtype=torch.float64) / data_axis.size
        data_axis.all_reduce(total)
        losses.append(float(total))
    return losses


class PlainRun(NamedTuple):
    """Of every step the loss, and the norm before clipping."""

    losses: list[float]
    norms: list[float]


def train_plain(
    model: nn.Module,
    data: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float = 0.0,
    before: Callable[[int], None] | None = None,
    after: Callable[[], None] | None = None,
) -> PlainRun:
    """Plain torch on whole batches; parameters without a gradient get zeros. `before` gets the step's number."""
    run = PlainRun([], [])
    trained = [param for group in optimizer.param_groups for param in group["params"]]
    for step, batch in enumerate(data):
        if before is not None:
            before(step)
        loss = model(batch) if isinstance(batch, torch.Tensor) else model(*batch)
        optimizer.zero_grad()
        loss.backward()
        for param in trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        run.norms.append(float(nn.utils.clip_grad_norm_(trained, clip or float("inf"))))
        optimizer.step()
        run.losses.append(float(loss.detach()))
        if after is not None:
            after()
    return run


def train_warm(model: nn.Module, data: Iterable[Batch], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Plain torch on whole batches as `WARM` says, or with another optimizer. Returns the loss of each step."""
    chosen = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    def warm_up(step: int) -> None:
        index = step - 1  # the schedule's index that is in force at this step
        for group in chosen.param_groups:
            group["lr"] = 3e-3 * (0.0 if index < 0 else min(1.0, math.log(index + 1) / math.log(5)))

    return train_plain(model, data, chosen, clip=0.5, before=warm_up).losses


def weights(of: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters of a model, or of an engine's, by name, gathered where they are cut."""
    model = getattr(of, "module", of)
    owners = {id(owner): owner for owner in map(sharded_param.owner_of, model.parameters()) if owner is not None}
    with ExitStack() as stack:
        for owner in owners.values():
            stack.enter_context(owner.whole(owner.table.all_units))
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def check_equal(model: nn.Module, reference: nn.Module, *, rtol: float = 2e-5, atol: float = 2e-6) -> None:
    """Fail unless all parameters are close."""
    theirs = weights(reference)
    for name, ours in weights(model).items():
        torch.testing.assert_close(ours, theirs[name], rtol=rtol, atol=atol, msg=lambda text, at=name: f"{at}: {text}")
