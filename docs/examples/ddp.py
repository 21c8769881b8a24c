"""Trains a small GPT with DistributedDataParallel or FSDP2 of plain torch, on any number of ranks.

    srun python docs/examples/ddp.py --steps 100
    mpispeed run -n 2 docs/examples/ddp.py --fsdp

Of a script for torchrun only the import of `mpispeed.torch_backend` and the name of the backend are changed.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from text import Windows, standard_library
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import mpispeed.torch_backend  # noqa: F401  registers "mpi4py"


def main() -> None:
    """Train, and print the mean loss of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--fsdp", action="store_true", help="shard parameters, gradients and optimizer states")
    args = parser.parse_args()

    dist.init_process_group("mpi4py")
    torch.manual_seed(1234)
    model = GPT(Shape(layers=2, width=64, block=64))
    model = fully_shard(model) if args.fsdp else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = Windows(standard_library(cap_bytes=1_000_000)[0], 64)
    batches = DataLoader(windows, batch_size=16, sampler=DistributedSampler(windows))

    for step, (x, y) in zip(range(1, args.steps + 1), batches, strict=False):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if dist.get_rank() == 0:
                print(
                    f"step {step} of {args.steps} on {dist.get_world_size()} ranks: loss {mean.item():.6f}", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
