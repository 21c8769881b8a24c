"""A feature of one's own that clips weights to a range; run it by `mpispeed run -n 2 docs/examples/clip_weights.py`.

It has a section in the config, a place in the step, a series in the monitors, and state in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import mpispeed
from mpispeed.features import Context, Feature, Hooks, Place, Section, register


class ClipWeights(Section):
    """The section "clip_weights" of the config."""

    limit: float = 0.0


class Clipper:
    """Clips this rank's masters after updates and counts how many elements it has clipped."""

    def __init__(self, context: Context) -> None:
        self.context, self.limit, self.clipped = context, context.settings.limit, 0

    def __call__(self, ctx: Any) -> None:
        """Runs in every step."""
        if not ctx.skip:
            self.context.edit_masters(self.clip)
            self.context.write("Train/clipped_weights", self.clipped)

    def clip(self, name: str, values: torch.Tensor) -> None:
        """Clip a range of one parameter in place."""
        self.clipped += int((values.abs() > self.limit).sum())
        values.clamp_(-self.limit, self.limit)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on counting where the checkpoint was written."""
        self.clipped = state["clipped"]


def attach(context: Context) -> Hooks | None:
    """Nothing where the limit is 0."""
    clipper = Clipper(context) if context.settings.limit > 0 else None
    return clipper and Hooks([(Place.UPDATED, clipper)], state=lambda: {"clipped": clipper.clipped}, load=clipper.load)


if __name__ == "__main__":
    register(Feature("clip_weights", attach, section=ClipWeights))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "clip_weights": {"limit": 0.1}}
    engine, *_ = mpispeed.initialize(model=torch.nn.Linear(16, 1), config=config)
    for _ in range(10):
        loss = engine(torch.randn(4, 16)).square().mean()
        engine.backward(loss)
        engine.step()
    print(f"rank {engine.mesh.rank}: the largest weight is {engine.module.weight.abs().max():.3f}")  # at most 0.100
