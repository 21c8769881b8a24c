"""Jobs in layouts of three axes; run by test_parallel_matrix.

save FOLDER: trains each layout of this number of ranks, saves, and goes on unbroken; losses-RANKS.json tells how.
load FOLDER LOADS SOURCE...: loads what these layouts saved, each into LOADS others, compares, and goes on.
break HOW: something fails on one stage in the middle of a batch.
"""

import json
import sys
from pathlib import Path

import torch

from mpispeed.mesh import start
from tests.helpers.pipes import LAYOUTS, Case, Layout, feed, train
from tests.helpers.saved import difference

BEFORE, AFTER = 2, 3
HOW = dict(zip(LAYOUTS, ("1f1b", "interleaved", "gpipe", "zb-h1", "1f1b", "zb-h1", "1f1b", "interleaved"), strict=True))


def cases(ranks):
    """Each layout by a schedule of its own, states at another stage than the one before."""
    found = [Case(layout, HOW[layout], number % 4, is_tied=True) for number, layout in enumerate(LAYOUTS)]
    return [case for case in found if case.layout.ranks == ranks]


def save(folder):
    comm, losses = start().comm, {}
    for case in cases(comm.size):
        engine = case.engine()
        train(engine, range(BEFORE))
        engine.save_checkpoint(str(folder / str(case.layout)), tag="t")
        losses[str(case.layout)] = train(engine, range(BEFORE, BEFORE + AFTER))
        engine.destroy()
    if comm.rank == 0:
        (folder / f"losses-{comm.size}.json").write_text(json.dumps(losses))


def load(folder, loads, *sources):
    comm, rows = start().comm, []
    targets, again = cases(comm.size), folder / f"again-{comm.size}"
    for number, source in enumerate(sources):
        for case in [targets[(number + k) % len(targets)] for k in range(min(int(loads), len(targets)))]:
            engine = case.engine()
            engine.load_checkpoint(str(folder / source))
            engine.save_checkpoint(str(again), tag="t", overwrite=True)
            different = difference(folder / source, again) if comm.rank == 0 else ""
            rows.append((source, str(case.layout), different, train(engine, range(BEFORE, BEFORE + AFTER))))
            engine.destroy()
    if comm.rank == 0:
        (folder / f"loads-{comm.size}.json").write_text(json.dumps(rows))


def failing(*_):
    """A hook that fails."""
    msg = "planted in a layer"
    raise ZeroDivisionError(msg)


def break_stage(how):
    """Stage 1 of 3 fails, or the last one gets too few batches."""
    engine = Case(Layout(3, 1, 1)).engine()
    train(engine, [0])
    if engine.stage_id == 1 and how == "forward":
        layer = next(module for module in engine.module.modules() if isinstance(module, torch.nn.Linear))
        layer.register_forward_hook(failing)
    if engine.stage_id == 1 and how == "backward":
        next(engine.module.parameters()).register_hook(failing)
    batches = feed(engine, 1)
    if engine.is_last_stage() and how == "data":
        batches = iter([next(batches)])
    engine.train_batch(batches)
    sys.stderr.write("the batch came to its end\n")


if __name__ == "__main__":
    if sys.argv[1] == "break":
        break_stage(sys.argv[2])
    elif sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    else:
        load(Path(sys.argv[2]), *sys.argv[3:])
