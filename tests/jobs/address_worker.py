"""Trains equal layers under a limit of the address space, or says how much of it a tiny engine takes."""

import json
import resource
import sys
from pathlib import Path

import torch
from torch import nn

import mpispeed
from mpispeed.zero import Init

WIDTH = 1024
STEPS = 2
SAMPLES = 4
STATE_BYTES = 2 + 4 + 4 + 4 + 4  # parameter, master, two moments, gradient of one element


class Residual(nn.Module):
    """Keeps the size of what comes in, however many of them follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x + self.linear(x), dim=-1)


def settings(folder: Path | None) -> dict:
    """Stage 3 in bf16 with small buffers; everything is in swap files below `folder` if there is one."""
    unit = WIDTH * WIDTH
    zero: dict = {
        "stage": 3,
        "reduce_bucket_size": unit,
        "sub_group_size": unit,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": unit,
        "stage3_max_live_parameters": 2 * unit,
        "stage3_max_reuse_distance": 0,
    }
    if folder is not None:
        disk = {"device": "nvme", "nvme_path": str(folder)}
        zero["offload_param"] = {**disk, "max_in_cpu": 0, "buffer_count": 2, "buffer_size": unit}
        zero["offload_optimizer"] = {**disk, "buffer_count": 8, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def peak_bytes() -> int:
    """Most address space that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPeak"))


def model_of(layers: int, config: dict) -> nn.Module:
    """Born cut, where the config says."""
    torch.manual_seed(5)
    with Init(config_dict_or_path=config):
        return nn.Sequential(*(Residual() for _ in range(layers)))


def main(folder: Path | None, layers: int, limit: int) -> None:
    """Print losses, the peak, and what buffers came to."""
    if limit:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    world = mpispeed.init_distributed()
    config = settings(folder)
    engine = mpispeed.initialize(model=model_of(layers, config), config=config)[0]
    generator = torch.Generator().manual_seed(world.rank)
    losses = []
    for _ in range(STEPS):
        loss = engine(torch.randn(SAMPLES, WIDTH, generator=generator).bfloat16()).float()[:, :16].square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    tiers, arena = engine.parts.params.tiers, engine.parts.params.arena
    found = {
        "losses": losses,
        "peak": peak_bytes(),
        "buffers": [tiers.buffer_bytes, tiers.most_buffer_bytes],
        "arena": arena.owned_bytes,
        "swapped": tiers.file_bytes,
    }
    told = world.comm.gather_objects(found)
    if world.rank == 0:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    # No engine.destroy(), which would make the model whole in memory.


main(None if sys.argv[1] == "-" else Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
