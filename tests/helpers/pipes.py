"""The GPT of the examples as a pipeline of 8 blocks: layouts of ranks, engines, plain training to compare with."""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology
from tests.zoo.training import config, start, weights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
gpt = importlib.import_module("gpt")
gpt_layers = importlib.import_module("gpt_layers")
text = importlib.import_module("text")

SHAPE = gpt.Shape(layers=8, heads=4, width=32, block=12)
BATCH = 16
LR = 1e-3
SEED = 1234


class Layout(NamedTuple):
    """How many ranks each axis has."""

    pipe: int
    model: int
    data: int

    @property
    def ranks(self) -> int:
        return math.prod(self)

    def __str__(self) -> str:
        return f"p{self.pipe}m{self.model}d{self.data}"


LAYOUTS = tuple(
    Layout(*sizes) for sizes in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1))
)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        layout: of the ranks.
        schedule: its name; "interleaved" has two chunks per rank.
        stage: of zero_optimization.
        dtype: "fp32" or "bf16".
        is_per_micro: sums and gathers happen in every micro-batch.
        clip: largest norm, 0 for no clipping.
        is_tied: embedding and head are one weight.
    """

    layout: Layout
    schedule: str = "1f1b"
    stage: int = 0
    dtype: str = "fp32"
    is_per_micro: bool = False
    clip: float = 1.0
    is_tied: bool = False

    def __str__(self) -> str:
        return f"{self.layout}-{self.schedule}-z{self.stage}{'m' if self.is_per_micro else ''}-{self.dtype}"

    @property
    def micro_batches(self) -> int:
        """Of a global batch: enough to fill a pipeline, and no more, because each one takes time."""
        return 2 if self.layout.pipe == 1 else 4

    def settings(self, **more: Any) -> dict[str, Any]:
        """The config."""
        settings = config(
            self.stage,
            BATCH,
            self.micro_batches,
            dtype=self.dtype,
            gradient_clipping=self.clip,
            optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
            pipeline={"schedule": self.schedule, "per_micro_batch": self.is_per_micro},
            steps_per_print=10**9,
        )
        if self.layout.model > 1:
            slices = {"autotp_size": self.layout.model, "injection_policy_tuple": gpt_layers.SLICES}
            settings["tensor_parallel"] = slices
        return settings | more

    def module(self, **more: Any) -> PipelineModule:
        """The layers of this rank's stage. Collective over: all ranks."""
        pipe, model, data = self.layout
        arguments = {
            "topology": PipeModelDataParallelTopology(num_pp=pipe, num_mp=model, num_dp=data),
            "loss_fn": gpt_layers.cross_entropy,
            "seed_layers": True,
            "base_seed": SEED,
            "num_chunks": 2 if self.schedule == "interleaved" else 1,
        }
        return PipelineModule(gpt_layers.layers(SHAPE, is_tied=self.is_tied), **arguments | more)

    def engine(self, **more: Any) -> Any:
        """Collective over: all ranks."""
        return start(self.settings(**more), self.module())


def every_case() -> list[Case]:
    """All layouts, schedules, stages and dtypes that there are together."""
    found = []
    for layout, schedule, stage, dtype in itertools.product(LAYOUTS, SCHEDULES, range(4), ("fp32", "bf16")):
        if schedule != "interleaved" or layout.pipe > 1:  # chunks fill waits, and one stage has none
            found.append(Case(layout, schedule, stage, dtype))
            if stage >= 2:
                found.append(Case(layout, schedule, stage, dtype, is_per_micro=True))
    return found


# Every pair of a layout, a schedule, a stage, a dtype and sums per micro-batch (m) that there is, in few cases; "3m",
# which sends most, on few ranks.
_PAIRWISE = """
111 1f1b 0 bf16         111 gpipe 3m fp32       111 zb-h1 1 bf16        111 zb-h1 2 bf16
211 1f1b 2 bf16         211 gpipe 1 bf16        211 interleaved 0 bf16  211 zb-h1 3m fp32
121 1f1b 0 fp32         121 1f1b 2m fp32        121 gpipe 1 bf16        121 zb-h1 3m fp32
112 1f1b 0 bf16         112 1f1b 1 bf16         112 gpipe 3m fp32       112 zb-h1 2 bf16
221 1f1b 1 fp32         221 gpipe 2m bf16       221 interleaved 3 bf16  221 zb-h1 0 bf16
212 1f1b 3 bf16         212 gpipe 0 fp32        212 interleaved 2m fp32 212 zb-h1 1 bf16
122 1f1b 1 fp32         122 1f1b 3 bf16         122 gpipe 2m fp32       122 zb-h1 0 bf16
411 1f1b 2m fp32        411 gpipe 3 bf16        411 interleaved 1 bf16  411 zb-h1 0 fp32
"""


def pairwise_cases() -> list[Case]:
    """Few of them that have every pair of values."""
    words = _PAIRWISE.split()
    rows = zip(*(words[first::4] for first in range(4)), strict=True)
    return [Case(Layout(*map(int, at)), how, int(stage[0]), dtype, "m" in stage) for at, how, stage, dtype in rows]


# -- data --------------------------------------------------------------------------------------------------------------


@cache
def windows() -> torch.Tensor:
    """The demo's text, cut. Shape: [many, SHAPE.block + 1]."""
    found = text.Windows(text.standard_library(40_000)[0], SHAPE.block)
    return torch.stack([torch.cat([x, y[-1:]]) for x, y in (found[index] for index in range(64 * BATCH))])


def batch(step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of a global batch. Shapes: [size, SHAPE.block]."""
    own = windows()[step * BATCH : step * BATCH + size]
    return own[:, :-1], own[:, 1:]


def micro_batches(engine: Any, step: int) -> list[Any]:
    """This data rank's pairs of inputs and labels."""
    x, y = batch(step, engine.train_batch_size())
    rank, ranks = engine.mesh.index("data"), engine.mesh["data"].size
    size = engine.train_micro_batch_size_per_gpu()
    starts = [(micro * ranks + rank) * size for micro in range(engine.gradient_accumulation_steps())]
    return [(x[start : start + size], y[start : start + size]) for start in starts]


def feed(engine: Any, step: int) -> Iterator[Any] | None:
    """What this rank passes to `train_batch`: nothing on middle stages."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter(micro_batches(engine, step))


# -- training ----------------------------------------------------------------------------------------------------------


def train(engine: Any, steps: Iterable[int]) -> list[float]:
    """The loss of each step. Collective over: all ranks."""
    return [float(engine.train_batch(feed(engine, step))) for step in steps]


def all_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters of all stages, by name; of slices this rank's. Collective over: all ranks."""
    found: dict[str, torch.Tensor] = {}
    for own in engine.mesh["pipe"].gather_objects(weights(engine)):
        for name, tensor in own.items():
            assert name not in found or torch.equal(found[name], tensor), f"{name} differs between stages"
            found[name] = tensor
    return found


class Plain(torch.nn.Module):
    """All layers on one rank, run by nobody but torch."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList()
        with torch.random.fork_rng(devices=[]):
            for index, spec in enumerate(gpt_layers.layers(SHAPE, is_tied=is_tied)):
                torch.manual_seed(SEED + index)
                self.parts.append(self.parts[0] if is_tied and index == SHAPE.layers + 2 else spec.build())
        self.is_tied = is_tied

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for part in list(self.parts)[:-1]:
            x = part(x)
        x = gpt_layers.scores(self.parts[0], x) if self.is_tied else self.parts[-1](x)
        return gpt_layers.cross_entropy(x, y)


class PlainRun:
    """Training in one process with torch's optimizer, on whole global batches; bf16 has fp32 masters."""

    def __init__(self, dtype: str = "fp32", clip: float = 1.0, *, is_tied: bool = False) -> None:
        self.model, self.clip = Plain(is_tied=is_tied), clip
        self.masters = [param.detach().clone() for param in self.model.parameters()]
        if dtype == "bf16":
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.masters, lr=LR, weight_decay=0.01)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
        """The loss before the step, and the norm of the gradients before clipping."""
        params = list(self.model.parameters())
        loss = self.model(x, y)
        for master, grad in zip(self.masters, torch.autograd.grad(loss, params), strict=True):
            master.grad = grad.float()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self.clip or math.inf)
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, params, strict=True):
                param.copy_(master)
        return float(loss.detach()), float(norm)


@cache
def plain(
    steps: int, dtype: str = "fp32", clip: float = 1.0, *, is_tied: bool = False
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(losses, norms) of the first steps in one process."""
    run = PlainRun(dtype, clip, is_tied=is_tied)
    losses, norms = zip(*(run.step(*batch(step)) for step in range(steps)), strict=True)
    return losses, norms
