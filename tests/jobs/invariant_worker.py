"""Trains runs of slots with dropout and clipping at all stages in two dtypes; rank 0 writes losses and digests."""

import hashlib
import json
import random
import sys

import numpy as np
import torch
from torch import nn

import mpispeed
from mpispeed.data import RepeatingLoader
from mpispeed.mesh.world import current
from tests.zoo.training import config, weights

WIDTH, SAMPLES, SLOTS, MICRO = 12, 40, 12, 2


class Drops(nn.Module):
    """Dropout of torch, and noise of numpy and Python; returns the mean square."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.first, self.last = nn.Linear(WIDTH, 24), nn.Linear(24, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        noise = 1.0 + 0.01 * (random.random() + float(np.random.rand()))
        y = self.last(self.drop(torch.tanh(self.first(x.to(self.first.weight.dtype)))))
        return (y * noise).float().square().mean()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator) + 0.1 * torch.rand(())


def settings(stage, dtype):
    made = config(stage, SLOTS * MICRO, dtype=dtype, gradient_clipping=0.05)
    made["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-3}}
    return made | {"train_micro_batch_size_per_gpu": MICRO, "reduction": "invariant"}


def digest(tensors):
    told = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        told.update(name.encode() + value.float().numpy().tobytes())
    return told.hexdigest()


def main(folder, load, save, steps):
    found = {}
    for stage in range(4):
        for dtype in ("fp32", "bf16"):
            name = f"{stage}-{dtype}"
            made = mpispeed.initialize(model=Drops(), config=settings(stage, dtype), training_data=Rows())
            engine, loader = made[0], made[2]
            torch.manual_seed(current().rank)  # what ranks draw outside of slots does not matter
            if load != "-":
                engine.load_checkpoint(f"{folder}/{name}", tag=load)
            feed = iter(RepeatingLoader(loader))
            losses = [engine.train_batch(feed).hex() for _ in range(int(steps))]
            found[name] = [losses, engine.get_global_grad_norm().hex(), digest(weights(engine))]
            if save != "-":
                engine.save_checkpoint(f"{folder}/{name}", tag=save)
            engine.destroy()
    if current().rank == 0:
        sys.stdout.write("FOUND " + json.dumps(found) + "\n")


main(*sys.argv[1:])
