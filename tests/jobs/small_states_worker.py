"""Trains runs of slots whose states rest in codes, at all stages; rank 0 writes losses and digests."""

import hashlib
import json
import sys

import torch

import mpispeed
from mpispeed.data import RepeatingLoader
from mpispeed.mesh.world import current
from mpispeed.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config

SLOTS, MICRO = 12, 2
INT8 = {"optimizer_states": "int8"}
TYPES = {
    0: INT8 | {"master_dtype": "bf16", "master_rounding": "kahan"},
    1: {"optimizer_states": {"exp_avg": "int8", "exp_avg_sq": "bf16"}},
    2: INT8 | {"master_dtype": "bf16", "master_rounding": "stochastic"},
    3: INT8 | {"master_dtype": "bf16", "master_rounding": "kahan"},
}


def states(engine):
    """Masters and moments of all parameters, as they are at rest. Collective over: all ranks."""
    for name, param in engine.module.named_parameters():
        yield name, safe_get_full_fp32_param(param)
        for slot in ("exp_avg", "exp_avg_sq"):
            yield f"{name} {slot}", safe_get_full_optimizer_state(param, slot)


def main(folder, load, save, steps):
    found = {}
    for stage, types in TYPES.items():
        settings = config(stage, SLOTS * MICRO, dtype="bf16", data_types=types, reduction="invariant", **WARM)
        settings["train_micro_batch_size_per_gpu"] = MICRO
        made = mpispeed.initialize(
            model=TinyLM(), config=settings, training_data=list(batches(1, 3 * SLOTS * MICRO)[0])
        )
        engine, loader = made[0], made[2]
        if load != "-":
            engine.load_checkpoint(f"{folder}/{stage}", tag=load)
        feed = iter(RepeatingLoader(loader))
        losses = [float(engine.train_batch(feed)).hex() for _ in range(int(steps))]
        told = hashlib.sha256()
        for name, values in states(engine):
            told.update(name.encode() + values.contiguous().numpy().tobytes())
        found[str(stage)] = [losses, told.hexdigest()]
        if save != "-":
            engine.save_checkpoint(f"{folder}/{stage}", tag=save)
        engine.destroy()
    if current().rank == 0:
        sys.stdout.write("FOUND " + json.dumps(found) + "\n")


torch.set_num_threads(1)
main(*sys.argv[1:])
