"""A small pipeline in which passes, losses and data fail on demand: on which ranks, and at which micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpispeed.mesh import Mesh, Topology
from mpispeed.nn.tensor import ColumnLinear, RowLinear
from mpispeed.pipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from tests.helpers.pipes import Layout
from tests.zoo.training import config, start

WIDTH, MICRO_BATCHES, SAMPLES = 6, 4, 2


class Planted(ValueError):
    """The failure."""


@dataclass
class Fault:
    """What fails next on this rank, at which of its micro-batches; `error` is what was raised then."""

    place: str = ""
    at: int = 0
    seen: int = 0
    error: Planted | None = None

    def look(self, place: str) -> None:
        """Fail, if it is time to."""
        if place == self.place:
            self.seen += 1
            if self.seen == self.at + 1:
                self.error = Planted(f"{place} of micro-batch {self.at}")
                raise self.error

    def arm(self, place: str = "", at: int = 0) -> None:
        """Plan a failure; without a place, none."""
        self.place, self.at, self.seen, self.error = place, at, 0, None


FAULT = Fault()


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        FAULT.look("backward")
        return grads[0]


class Layer(nn.Module):
    """A residual layer with dropout, cut over `slices` if there are any."""

    def __init__(self, slices: Any, *, can_fail: bool) -> None:
        super().__init__()
        if slices is None:
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        else:
            self.up, self.down = ColumnLinear(WIDTH, 8, slices), RowLinear(8, WIDTH, slices)
        self.dropout, self.can_fail = nn.Dropout(0.1), can_fail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.can_fail:
            FAULT.look("forward")
            x = _Breaks.apply(x)
        return self.dropout(x + self.down(torch.tanh(self.up(x))))


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean square."""
    FAULT.look("loss")
    return ((outputs.float() - labels) ** 2).mean()


def engine(world: Any, layout: Layout, schedule: str, stage: int, *, is_per_micro: bool = False, **more: Any) -> Any:
    """Two layers for each chunk of a stage; one of each can fail. Collective over: all ranks."""
    topology = PipeModelDataParallelTopology(num_pp=layout.pipe, num_mp=layout.model, num_dp=layout.data)
    slices = Mesh(Topology(layout._asdict()), world)["model"] if layout.model > 1 else None
    chunks = 2 if schedule == "interleaved" else 1
    specs = [LayerSpec(Layer, slices, can_fail=bool(index % 2)) for index in range(2 * layout.pipe * chunks)]
    shape = {"num_chunks": chunks, "partition_method": "uniform"}
    made = PipelineModule(specs, topology=topology, loss_fn=loss, seed_layers=True, base_seed=5, **shape)
    settings = config(
        stage,
        SAMPLES * MICRO_BATCHES * layout.data,
        MICRO_BATCHES,
        optimizer={"type": "AdamW", "params": {"lr": 0.01}},
        gradient_clipping=0.5,
        pipeline={"schedule": schedule, "per_micro_batch": is_per_micro},
        **more,
    )
    return start(settings, made)


def micro_batches(engine: Any, step: int) -> Iterator[Any] | None:
    """This data rank's pairs; taking one may fail."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return _pairs(torch.Generator().manual_seed(100 * step + engine.mesh.index("data")))


def _pairs(generator: torch.Generator) -> Iterator[Any]:
    for _ in range(MICRO_BATCHES):
        FAULT.look("data")
        yield tuple(torch.randn(2, SAMPLES, WIDTH, generator=generator))
