"""Saves under every layout, or loads what others saved; run by test_reshard.

save FOLDER: trains each layout for some steps, saves, and goes on unbroken; losses.json tells how.
load FOLDER SHIFT LOADS: loads each saved layout into others, compares tensors, and goes on; writes its findings.
"""

import json
import sys
from pathlib import Path

import mpispeed
from mpispeed.mesh import start
from tests.helpers.saved import difference
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged

BATCH, BEFORE, AFTER = 48, 3, 3
DATA = batches(BEFORE + AFTER, BATCH)


def layouts(size, disk):
    """Name -> (settings of zero_optimization, other sections) on so many ranks."""
    cut = {"stage": 3, "stage3_param_persistence_threshold": 0}
    bf16 = {"bf16": {"enabled": True}}
    return {
        "0": ({"stage": 0}, {}),
        "1": ({"stage": 1}, {}),
        "2": ({"stage": 2}, {}),
        "3": (cut, {}),
        "mics": ({**cut, "mics_shard_size": 2 if size % 2 == 0 else 1}, {}),
        "swapped": ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": disk}}, {}),
        "1 bf16": ({"stage": 1}, bf16),
        "3 bf16": (cut, bf16),
        "3 files": (cut, {"checkpoint": {"files": 3, "writing": "aggregated"}}),
    }


def make(section, more):
    settings = config(0, BATCH, 1, **(WARM | more)) | {"zero_optimization": section}
    return mpispeed.initialize(model=TinyLM(), config=settings)[0]


def save(folder):
    found = {}
    for name, (section, more) in layouts(start().size, str(folder / "disk")).items():
        engine = make(section, more)
        train_averaged(engine, DATA[:BEFORE])
        engine.save_checkpoint(str(folder / name), tag="four")
        found[name] = train_averaged(engine, DATA[BEFORE:])
        engine.destroy()
    if start().rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))


def load(folder, shift, loads):
    comm, rows = start().comm, []
    targets = layouts(comm.size, str(folder / "disk"))
    again = folder / f"again-{comm.size}"
    for number, source in enumerate(targets):
        for k in range(loads):
            target = list(targets)[(number + shift * loads + k + 1) % len(targets)]
            engine = make(*targets[target])
            engine.load_checkpoint(str(folder / source))
            engine.save_checkpoint(str(again), tag="four", overwrite=True)
            different = difference(folder / source, again) if comm.rank == 0 else ""
            rows.append((source, target, different, train_averaged(engine, DATA[BEFORE:])))
            engine.destroy()
    if comm.rank == 0:
        (folder / f"loads-{comm.size}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    where = Path(sys.argv[2])
    if sys.argv[1] == "save":
        save(where)
    else:
        load(where, *map(int, sys.argv[3:]))
