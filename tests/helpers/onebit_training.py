"""Training with 1-bit optimizers: a small model, settings, and fp64 references of n workers in the units of an engine.

Holes between the tensors of a unit carry nothing in an engine: they and their errors are 0 after every mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from mpispeed.optim.choice import build
from mpispeed.optim.exchange import Exchange
from tests.helpers import onebit_reference as reference
from tests.zoo import models
from tests.zoo.models import Mlp
from tests.zoo.training import config, own_part, start, weights

BATCH = 36  # divides by 3 micro-batches on 1, 2, 3 and 4 ranks
LR = 4e-3
SHARED = {"lr": LR, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
FREEZE = 6
LAMB = {"max_coeff": 5.0, "min_coeff": 0.05, "coeff_beta": 0.8, "factor_max": 3.0, "factor_min": 0.4,
        "factor_threshold": 0.1}  # fmt: skip
# Variance steps 1, 2, 4, 6, coded ones between; from 9 on local ones, which meet at 9, 10, 12, 14, 16, 20, 24.
ZERO_ONE = {"var_freeze_step": 8, "var_update_scaler": 2, "local_step_scaler": 2, "local_step_clipper": 4}
PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {**SHARED, "freeze_step": FREEZE},
    "ZeroOneAdam": {**SHARED, **ZERO_ONE},
    "OneBitLamb": {**SHARED, **LAMB, "lr": 2e-2, "freeze_step": FREEZE},
}
NAMES = tuple(PARAMS)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}


def samples(steps: int, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` global batches for `Mlp`."""
    return models.samples(steps, BATCH, seed, width=8, outs=4)


def settings(name: str, stage: int = 0, accumulation: int = 1, **more: Any) -> dict[str, Any]:
    """A config for `name`, with one unit for every layer."""
    given = {"optimizer": {"type": name, "params": PARAMS[name]}, "steps_per_print": 10**9}
    return config(stage, BATCH, accumulation, zero={"stage3_param_persistence_threshold": 0}, **(given | more))


def engine_of(name: str, stage: int = 0, accumulation: int = 1, model: nn.Module | None = None, **more: Any) -> Any:
    """An engine around `model`, by default a fresh `Mlp`."""
    return start(settings(name, stage, accumulation, **more), Mlp() if model is None else model)


def run_step(engine: Any, batch: tuple[torch.Tensor, ...], factor: float = 1.0) -> float:
    """One global batch; this rank's loss, which is taken times `factor`."""
    total = 0.0
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(*own_part(engine, batch, micro)) * factor
        total += float(engine.backward(loss).detach())
        engine.step()
    return total


def kind_of(engine: Any, step: int) -> Exchange:
    """What travels for update number `step`."""
    return engine.mpispeed.parts.optimization.exchange.kind(step)


def states_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of masters, states and errors of this rank."""
    parts, found = engine.mpispeed.parts, {}
    for unit in parts.table.units:
        found[f"{unit.index} master"] = parts.params.shards.master(unit).clone()
        for slot, tensor in parts.optimization.states.of(unit).items():
            found[f"{unit.index} {slot}"] = tensor.clone()
        errors = parts.optimization.exchange.coder.errors.get(unit.index)
        if errors is not None:
            found[f"{unit.index} worker"], found[f"{unit.index} server"] = errors.worker.clone(), errors.server.clone()
    return found


def is_same_on_ranks(engine: Any, axis: str = "data") -> bool:
    """Whether all ranks of the axis have the same bits of all parameters. Collective over: the axis."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights(engine).items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return len(set(engine.mesh[axis].gather_objects(digest.hexdigest()))) == 1


# -- references --------------------------------------------------------------------------------------------------------


class UnitMeans:
    """One `OneBitMean` for each unit of an engine, over the tensors side by side; holes are 0 in and after it.

    `margin` is how near to 0 any coded value has come, in scales: what is nearer than rounding may get another sign.
    """

    def __init__(self, units: Sequence[Any], ranks: int) -> None:
        self.units = units
        self.means = [reference.OneBitMean(ranks, unit.layout.padded) for unit in units]
        self.margin = float("inf")
        self.live = [np.zeros(mean.padded, dtype=bool) for mean in self.means]
        for unit, live in zip(units, self.live, strict=True):
            for entry in unit.layout.entries:
                live[entry.span.slice] = True

    def __call__(self, inputs: list[reference.Array]) -> reference.Array:
        ends = np.cumsum([unit.layout.numel for unit in self.units])[:-1]
        found = [
            self._one(mean, live, [row[index] for row in map(lambda x: np.split(x, ends), inputs)])
            for index, (mean, live) in enumerate(zip(self.means, self.live, strict=True))
        ]
        return np.concatenate(found)

    def _one(self, mean: reference.OneBitMean, live: Any, parts: list[reference.Array]) -> reference.Array:
        if mean.workers == 1:
            return parts[0]
        wide = [np.zeros(mean.padded) for _ in parts]
        for target, part in zip(wide, parts, strict=True):
            target[live] = part
        mixed = [(w + error)[live] for w, error in zip(wide, mean.worker_errors, strict=True)]
        out = mean([w[: mean.length] for w in wide])
        # z of the servers: what they sent and what they kept
        sent = np.concatenate([
            t * s for t, s in zip(mean.sent["server scales"], self._signs(mean), strict=True)])  # fmt: skip
        common = (sent + np.concatenate(mean.server_errors))[live]
        taus = np.repeat(mean.sent["server scales"], mean.padded // mean.workers)[live]
        near = [np.abs(x).min() / s for x, s in zip(mixed, mean.sent["worker scales"], strict=True)]
        self.margin = min(self.margin, *near, (np.abs(common) / taus).min())
        for error in mean.worker_errors:
            error[~live] = 0.0
        for error, own in zip(mean.server_errors, np.split(live, mean.workers), strict=True):
            error[~own] = 0.0
        return out[live[: mean.length]]

    @staticmethod
    def _signs(mean: reference.OneBitMean) -> list[reference.Array]:
        return [np.unpackbits(np.array(b, dtype=np.uint8)) * 2.0 - 1.0 for b in mean.sent["server bytes"]]

    def clear(self) -> None:
        for mean in self.means:
            mean.clear()


class Workers:
    """n workers that train `Mlp` in fp64 as the engine's ranks do, with one of the references."""

    def __init__(self, name: str, units: Sequence[Any], ranks: int, accumulation: int) -> None:
        self.name, self.ranks, self.accumulation = name, ranks, accumulation
        self.entries = [entry for unit in units for entry in unit.layout.entries]
        self.ends = np.cumsum([entry.numel for entry in self.entries])[:-1]
        self.means = UnitMeans(units, ranks)
        self.model = Mlp().double()
        self.params = dict(self.model.named_parameters())
        first = self._flat({k: p.detach() for k, p in self.params.items()})
        if name == "OneBitAdam":
            self.rule: Any = reference.Adam(first, self.means, **PARAMS[name])
        elif name == "ZeroOneAdam":
            self.rule = reference.ZeroOne(first, self.means, ranks, **PARAMS[name])
        else:
            starts = np.split(first, self.ends)
            self.rule = reference.Lamb(starts, self.means, **PARAMS[name])

    def _flat(self, tensors: dict[str, torch.Tensor]) -> reference.Array:
        return np.concatenate([tensors[entry.name].numpy().reshape(-1) for entry in self.entries])

    def parameters(self, rank: int) -> dict[str, torch.Tensor]:
        """Of one worker, by name."""
        p = self.rule.p
        flat = p[rank] if self.name == "ZeroOneAdam" else np.concatenate(p) if self.name == "OneBitLamb" else p
        return {
            entry.name: torch.from_numpy(part.copy()).view(entry.shape)
            for entry, part in zip(self.entries, np.split(flat, self.ends), strict=True)
        }

    def gradient(self, rank: int, batch: tuple[torch.Tensor, torch.Tensor]) -> reference.Array:
        """Of one worker's samples at its own parameters."""
        with torch.no_grad():
            for name, value in self.parameters(rank).items():
                self.params[name].copy_(value)
        self.model.zero_grad()
        size = BATCH // (self.ranks * self.accumulation)
        for micro in range(self.accumulation):
            first = (micro * self.ranks + rank) * size
            x, y = (tensor[first : first + size].double() for tensor in batch)
            (self.model(x, y) / self.accumulation).backward()
        return self._flat({name: p.grad for name, p in self.params.items() if p.grad is not None})

    def step(self, batch: tuple[torch.Tensor, torch.Tensor], clip: float = 0.0, *, is_summed: bool = False) -> float:
        """One update; the norm before clipping: of the mean of gradients, or the root of the mean of their squares."""
        grads = [self.gradient(rank, batch) for rank in range(self.ranks)]
        of = [np.mean(grads, axis=0)] if is_summed else grads
        norm = float(np.sqrt(np.mean([np.sum(g**2) for g in of])))
        if clip:
            grads = [g * min(1.0, clip / (norm + 1e-6)) for g in grads]
        self.rule.step([np.split(g, self.ends) for g in grads] if self.name == "OneBitLamb" else grads)
        return norm


# Coded values of the reference stay farther from 0 than fp32 rounds them: another sign would change the course.
MARGIN = 1e-5
CLOSE = 5e-5  # of the largest element of a tensor; seen: 1.2e-5 with 0/1 Adam, 2e-6 with the others


def reference_run(
    name: str, units: Sequence[Any], ranks: int, accumulation: int, steps: int, clip: float = 0.0
) -> tuple[list[Any], list[list[dict[str, torch.Tensor]]], list[float]]:
    """(data, parameters of each worker after each step, norms), of the first seed that keeps coded values from 0."""
    rule, _ = build(name, PARAMS[name])
    for seed in range(40):
        data, workers, course, norms = samples(steps, seed), Workers(name, units, ranks, accumulation), [], []
        for step, batch in enumerate(data, start=1):
            norms.append(workers.step(batch, clip, is_summed=rule.exchanges(step) is Exchange.GRADIENT))
            if workers.means.margin < MARGIN:
                break
            course.append([workers.parameters(rank) for rank in range(ranks)])
        else:
            return data, course, norms
    msg = "every seed has coded values near 0"
    raise AssertionError(msg)
