"""Layouts of experts that save and load; run by test_expert_reshard.

save FOLDER: trains each layout, saves, and goes on unbroken; another engine of the same layout goes on from the file.
load FOLDER LOADS SOURCE...: loads what these layouts saved, each into LOADS others, compares tensors, and goes on.
break HOW: an expert of one rank fails, in "forward" or "backward"; "caught": the script goes on with the next batch.
"""

import json
import sys
from pathlib import Path

import torch

from mpispeed.mesh import start
from mpispeed.nn.expert import ExpertModules
from tests.helpers.expert_cases import Case, Steps, make
from tests.helpers.expert_model import HIDDEN, mean_loss
from tests.helpers.saved import difference
from tests.zoo.training import own_part

BATCH, BEFORE, AFTER, EXPERTS = 12, 3, 20, 12
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01}}, "gradient_clipping": 0.5}
DATA = torch.randn(BEFORE + AFTER, 2, BATCH, 2, HIDDEN, generator=torch.Generator().manual_seed(2))

# Of the ranks: size of the expert-parallel group, what else there is, ZeRO stage.
LAYOUTS = {
    4: [(4, "plain", 2), (4, "plain", 3), (2, "slices", 1), (2, "pipeline", 0), (4, "mics", 3), (1, "both", 2),
        (4, "states in nvme", 1), (2, "weights in cpu", 3)],
    3: [(3, "plain", 1), (1, "plain", 3), (3, "weights in nvme", 3)],
    2: [(2, "plain", 3), (1, "slices", 2), (2, "states in cpu", 2), (1, "pipeline", 1), (2, "hpz", 3)],
    1: [(1, "plain", 0), (1, "plain", 3)],
}  # fmt: skip


def named(layout):
    return "ep{}-{}-z{}".format(*layout).replace(" ", "_")


def built(layout, folder):
    """An engine. Collective over: all ranks."""
    ep, way, stage = layout
    case = Case(start().size, ep, way, stage, 2, "equal", False, True, Steps())
    micros = 2 if way in ("pipeline", "both") else 1
    sizes = {"train_batch_size": BATCH, "gradient_accumulation_steps": micros}
    return make(case, folder, case.shape._replace(experts=EXPERTS), mean_loss, **ADAM, **sizes)


def train(engine, batches):
    """The loss of each step, over all tokens. Collective over: all ranks."""
    losses = []
    for batch in batches:
        micros = [own_part(engine, tuple(batch), micro) for micro in range(engine.gradient_accumulation_steps())]
        if engine.mesh["pipe"].size > 1:
            losses.append(float(engine.train_batch(iter(micros))))
            continue
        loss = engine.backward(engine(*micros[0])).detach().double()
        engine.step()
        engine.mesh["data"].all_reduce(loss)
        losses.append(float(loss) / engine.mesh["data"].size)
    return losses


def save(folder, names):
    comm, found = start().comm, {}
    for layout in LAYOUTS[comm.size]:
        name = named(layout)
        if names and name not in names:
            continue
        engine = built(layout, folder / "swap")
        train(engine, DATA[:BEFORE])
        engine.save_checkpoint(str(folder / name), tag="t")
        found[name] = [train(engine, DATA[BEFORE:])]
        engine.destroy()
        again = built(layout, folder / "swap")
        again.load_checkpoint(str(folder / name))
        found[name].append(train(again, DATA[BEFORE:]))
        again.destroy()
    if comm.rank == 0:
        (folder / "losses.json").write_text(json.dumps(found))


def load(folder, loads, sources):
    comm, rows = start().comm, []
    targets, copy = LAYOUTS[comm.size], folder / f"again-{comm.size}"
    for number, source in enumerate(sources):
        for layout in [targets[(number + k) % len(targets)] for k in range(min(loads, len(targets)))]:
            engine = built(layout, folder / "swap")
            engine.load_checkpoint(str(folder / source))
            engine.save_checkpoint(str(copy), tag="t", overwrite=True)
            different = difference(folder / source, copy) if comm.rank == 0 else ""
            rows.append((source, named(layout), different, train(engine, DATA[BEFORE:])))
            engine.destroy()
    if comm.rank == 0:
        (folder / f"loads-{comm.size}.json").write_text(json.dumps(rows))


def failing(*_):
    """A hook that fails."""
    msg = "planted in an expert"
    raise ZeroDivisionError(msg)


def break_expert(how):
    engine = built((start().size, "plain", 2), Path())
    train(engine, DATA[:1])
    layer = next(module for module in engine.module.modules() if isinstance(module, ExpertModules))
    expert = layer.deepspeed_experts[0]
    if start().rank == 1:
        if how == "backward":
            next(expert.parameters()).register_hook(failing)
        else:
            hook = expert.register_forward_hook(failing)
    try:
        train(engine, DATA[1:2])
    except ZeroDivisionError:
        if how != "caught":
            raise
        hook.remove()
        train(engine, DATA[2:3])
    sys.stderr.write("the batch came to its end\n")


if __name__ == "__main__":
    if sys.argv[1] == "break":
        break_expert(sys.argv[2])
    elif sys.argv[1] == "save":
        save(Path(sys.argv[2]), sys.argv[3:])
    else:
        load(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
