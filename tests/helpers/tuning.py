"""A machine whose step times are known, for searches: random rates, overlap, caches, and traps."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from mpispeed.tuning.forecast import Forecast, Survey, survey
from mpispeed.tuning.protocol import Outcome, Task
from mpispeed.tuning.time_model import SUMS

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
MICRO_BATCHES = (1, 2, 4, 8, 16)
WAYS = ((5 * 10**5, False), (5 * 10**8, False), (5 * 10**8, True))
"""Elements of a bucket, and whether sums overlap with the backward pass."""


class Layers(nn.Module):
    """The matrices of a GPT of 7.3 million parameters; it is never run."""

    def __init__(self, depth: int = 4, width: int = 384) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(*size) for size in sizes)) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)


@cache
def layers() -> nn.Module:
    """Such a model without memory."""
    with torch.device("meta"):
        return Layers()


@cache
def grid(ranks: int = 2) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Forecast]]:
    """60 points, their settings, and the forecasts of a small model."""
    points = [
        {"stage": stage, "micro": micro, "bucket": bucket, "overlap": overlap}
        for stage, micro, (bucket, overlap) in itertools.product(range(4), MICRO_BATCHES, WAYS)
    ]
    configs = [
        {
            "train_micro_batch_size_per_gpu": point["micro"], "gradient_accumulation_steps": 2, "optimizer": ADAM,
            "zero_optimization": {
                "stage": point["stage"], "reduce_bucket_size": point["bucket"], "overlap_comm": point["overlap"],
            },
        }
        for point in points
    ]  # fmt: skip
    found = Survey.of_values(survey(configs, layers(), ranks=ranks))
    return points, configs, list(found.forecasts)


@dataclass
class Machine:
    """Step times by a law of its own, drawn by a seed; it knows nothing of the model that is fitted to it."""

    seed: int
    noise: float = 0.02
    slow: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dice = self._dice = random.Random(self.seed)
        self.forward, self.sample = (dice.lognormvariate(math.log(0.02), 0.8) for _ in range(2))
        self.call = dice.lognormvariate(math.log(1e-4), 1.0)
        self.byte = {verb: dice.lognormvariate(math.log(1e-9), 0.8) for verb in SUMS}
        self.update = dice.lognormvariate(math.log(3e-10), 0.7)
        self.hidden, self.cache = dice.uniform(-0.2, 0.9), dice.uniform(-0.1, 0.3)
        self.stages = [dice.gauss(1, 0.04) for _ in range(4)]

    def seconds(self, forecast: Forecast, stage: int) -> float:
        """Of a step, without noise."""
        micro = forecast.micro_batch
        compute = forecast.micro_steps * (
            self.forward + self.sample * micro * (1 + self.cache * math.tanh((micro - 4) / 6))
        )
        sent = self.call * self.slow.get("calls", 1.0) * sum(forecast.calls.values())
        sent += sum(self.byte.get(verb, 1e-9) * size for verb, size in forecast.sent.items())
        if forecast.is_overlapped:
            sent *= 1 - self.hidden
        files = sum(size for way, size in forecast.moved.items() if "nvme" in way) * 2e-9 * self.slow.get("files", 1.0)
        return (compute + sent + files + self.update * forecast.updated) * self.stages[stage]

    def measure(self, forecast: Forecast, stage: int) -> float:
        """A trial: with noise."""
        return self.seconds(forecast, stage) * math.exp(self._dice.gauss(0, self.noise))


class SyntheticJob:
    """A worker job that runs no script: forecasts are real, times are those of a machine.

    Args:
        machine: gives the times.
        ranks: of the job.
        limits: of memory, in place of this machine's.
        sample_bytes: activations of one sample.
        ends: name of a trial -> (status, reason) in place of a measurement.
    """

    def __init__(
        self,
        machine: Machine,
        ranks: int = 2,
        *,
        limits: Mapping[str, int] | None = None,
        sample_bytes: int = 0,
        ends: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.machine, self.ranks, self.limits, self.sample_bytes = machine, ranks, limits, sample_bytes
        self.ends, self.tasks, self.is_closed = dict(ends or {}), list[Task](), False
        self.limits_seconds = list[float | None]()

    @property
    def trials(self) -> list[str]:
        """Names of trials that were run."""
        return [task.name for task in self.tasks if task.kind == "trial"]

    def run(self, task: Task, limit_seconds: float | None = None) -> Outcome:
        """As `WorkerJob.run`."""
        self.tasks.append(task)
        self.limits_seconds.append(limit_seconds)
        if task.name in self.ends:
            status, reason = self.ends[task.name]
            return Outcome(task.name, status, reason)
        if task.kind == "survey":
            found = survey(task.payload, layers(), ranks=self.ranks)
            return Outcome(task.name, "ok", survey={**found, "limits": self.limits or found["limits"]})
        forecast = Survey.of_values(survey([task.config], layers(), ranks=self.ranks)).forecasts[0]
        assert forecast.refusal == ""
        seconds = self.machine.measure(forecast, task.config.get("zero_optimization", {}).get("stage", 0))
        figures = {
            "latency": seconds, "throughput": forecast.train_batch / seconds, "fwd": seconds / 3, "bwd": seconds / 2,
            "step": seconds / 6, "activation_bytes": self.sample_bytes * forecast.micro_batch,
            "FLOPS_per_gpu": 1e9 * forecast.train_batch / seconds,
        }  # fmt: skip
        return Outcome(task.name, "ok", metrics=figures)

    def close(self) -> None:
        """As `WorkerJob.close`."""
        self.is_closed = True
