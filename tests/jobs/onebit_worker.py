"""Trains 1-bit optimizers, saves in the middle and goes on, or goes on from there; run by test_onebit_restart.

save FOLDER: saves each after some steps and goes on unbroken.
load FOLDER: goes on from what was saved.
Both write what they found to RANKS.json.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from mpispeed.ckpt.read.reader import open_checkpoint
from mpispeed.mesh import start
from tests.helpers.onebit_training import NAMES, PARAMS, engine_of, run_step

BEFORE, AFTER = 29, 100  # 0/1 Adam meets at updates 28 and 32
BATCH = 192
OWN = {
    "OneBitAdam": {"lr": 4e-3, "freeze_step": 20},
    "ZeroOneAdam": {"lr": 3e-3, "var_freeze_step": 20},
    "OneBitLamb": {"lr": 2e-2, "freeze_step": 20},
}


TRUTH = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)) / 5


class Line(nn.Module):
    """One layer: a loss with one minimum, so that where a run ends depends little on single steps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 16)
        with torch.no_grad():
            self.layer.weight.copy_(TRUTH.T / 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layer(x), y)


def line(steps, size, seed):
    """Batches of inputs, and of what one line makes of them plus noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, size, 24, generator=generator)
    return list(zip(x, x @ TRUTH + torch.randn(steps, size, 16, generator=generator), strict=True))


DATA = line(BEFORE + AFTER, BATCH, seed=5)
TEST = line(1, 4000, seed=6)[0]


def make(name):
    """An engine whose rate falls to 0."""
    steps = {"warmup_num_steps": 1, "warmup_max_lr": OWN[name]["lr"], "total_num_steps": BEFORE + AFTER}
    scheduler = {"type": "WarmupDecayLR", "params": {**steps, "warmup_type": "linear"}}
    optimizer = {"type": name, "params": {**PARAMS[name], **OWN[name]}}
    return engine_of(name, optimizer=optimizer, scheduler=scheduler, model=Line(), train_batch_size=BATCH)


def go_on(engine):
    """The loss on other samples after the rest of the steps."""
    for batch in DATA[BEFORE:]:
        run_step(engine, batch)
    engine.eval()
    with torch.no_grad():
        return float(engine(*TEST))


def errors_of(engine):
    """By parameter: the mean of the errors of all workers, and the error of the servers. Collective over: all ranks."""
    found, coded, comm = {}, engine.mpispeed.parts.optimization.exchange.coder, engine.mesh["data"]
    for unit in engine.mpispeed.parts.table.units:
        errors = coded.errors[unit.index]
        worker, server = errors.worker.double(), torch.empty_like(errors.worker)
        comm.all_reduce(worker, "avg")
        comm.all_gather(server, errors.server)
        for entry in unit.layout.entries:
            found[entry.name] = worker[entry.span.slice], server[entry.span.slice]
    return found


def worst(engine, folder):
    """By how much, in units of the largest error, these differ from what was saved; servers' must not at all."""
    far = 0.0
    with open_checkpoint(folder) as source:
        for name, (worker, server) in errors_of(engine).items():
            saved = source.read_whole(name, "worker_error").double().mean(0).reshape(-1)
            far = max(far, float((worker - saved).abs().max() / saved.abs().max()))
            if not torch.equal(server, source.read_whole(name, "server_error").reshape(-1)):
                far = float("inf")
    return far


def main(how, folder):
    comm, found = start().comm, {}
    for name in NAMES:
        engine = make(name)
        if how == "save":
            for batch in DATA[:BEFORE]:
                run_step(engine, batch)
            engine.save_checkpoint(str(folder / name))
        else:
            engine.load_checkpoint(str(folder / name))
        found[name] = worst(engine, folder / name), go_on(engine)
        engine.destroy()
    if comm.rank == 0:
        (folder / f"{comm.size}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
