"""One rank of tools/same_bits.py: trains a small model through the public names and writes what every step gave."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import mpispeed
from mpispeed.pipe import LayerSpec, PipelineModule

BEFORE, AFTER, MICRO, WIDTH = 10, 20, 4, 48


class Block(nn.Module):
    """A residual MLP whose layers can be sliced by name."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (rows, width) -> the same."""
        out: torch.Tensor = x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))
        return out


class Model(nn.Module):
    """Three blocks and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return nn.functional.mse_loss(self.head(self.mlp(x)), wanted)


def config_of(case: str, swap: str) -> dict[str, Any]:
    """The DeepSpeed JSON of a case."""
    stage = int(case[-1]) if case.startswith("stage") else {"offload": 3, "onebit": 0, "pipeline": 1, "slices": 2}[case]
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if case == "offload":
        device = {"device": "nvme", "nvme_path": swap}
        zero |= {"offload_optimizer": device, "offload_param": device}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    if case == "onebit":
        optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 8}}
    more: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}} if case == "slices" else {}
    return {
        "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "optimizer": optimizer, "zero_optimization": zero, "bf16": {"enabled": case in ("stage1", "stage2", "stage3")},
        "steps_per_print": 0, **more,
    }  # fmt: skip


def batches(number: int, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The micro-batches of a step."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [(torch.randn(MICRO, WIDTH, generator=generator), torch.randn(MICRO, 7, generator=generator)) for _ in "ab"]


def step(engine: Any, case: str, number: int, rank: int) -> float:
    """One update; its mean loss."""
    if case == "pipeline":
        return float(engine.train_batch(iter(batches(number, 0))))
    total = 0.0
    for x, wanted in batches(number, 0 if case == "slices" else rank):
        dtype = torch.bfloat16 if case in ("stage1", "stage2", "stage3") else torch.float32
        loss = engine(x.to(dtype), wanted.to(dtype))
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return total


def weights(engine: Any, case: str) -> int:
    """A checksum of this rank's weights, whole at stage 3."""
    params = [param for _, param in sorted(engine.module.named_parameters())]
    with mpispeed.zero.GatheredParameters(params if case in ("stage3", "offload") else []):
        return zlib.crc32(b"".join(param.detach().float().numpy().tobytes() for param in params))


def main() -> None:
    """Train, or go on."""
    case, saved, swap, told = sys.argv[1:5]
    rank = MPI.COMM_WORLD.rank
    mpispeed.init_distributed()
    torch.manual_seed(11)
    if case == "pipeline":
        layers = [*(LayerSpec(Block) for _ in range(3)), LayerSpec(nn.Linear, WIDTH, 7)]
        model: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    else:
        model = Model()
    engine, *_ = mpispeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(case, swap))
    resumes = "--resume" in sys.argv
    if resumes:
        engine.load_checkpoint(f"{saved}/checkpoints")
    rows = []
    for number in range(BEFORE if resumes else 0, BEFORE + AFTER):
        loss = step(engine, case, number, rank)
        rows.append([loss.hex(), float(engine.get_global_grad_norm() or 0.0).hex(), f"{weights(engine, case):08x}"])
        if number == BEFORE - 1:
            engine.save_checkpoint(f"{saved}/checkpoints")
    everyone = MPI.COMM_WORLD.gather(rows)
    if everyone is not None:
        Path(told).write_text(
            json.dumps([[word for row in rows for word in row] for rows in zip(*everyone, strict=True)])
        )
    engine.destroy()


if __name__ == "__main__":
    main()
