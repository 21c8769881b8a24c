"""Run records as a writer leaves them, made at once."""

import json

import numpy as np

from mpispeed.native.checksum import crc32c
from mpispeed.record import layout

STARTED = 1_790_000_000.0
LOSS, LR, SECONDS = "Train/Samples/train_loss", "Train/Samples/lr", "Ranks/step_seconds"
NAMES = (LOSS, LR, SECONDS)
NONE, NO_SPANS = np.empty(0, layout.ROW), np.empty(0, layout.SPAN)
FACTS = {"config": {"train_batch_size": 8, "zero_optimization": {"stage": 2}}, "versions": {"mpispeed": "1"}}


def rows(steps, *, ranks=2, seed=0, started=STARTED, per_step=8):
    """Rows of a run: loss and rate on rank 0, seconds on all ranks, rank 1 being the slow one."""
    pick = np.random.default_rng(seed)
    found = []
    for step in steps:
        when = started + step
        found.append((0, 0, step, per_step * (step - 1), when, float(3 + pick.normal() / 10 - step / 100)))
        found.append((1, 0, step, per_step * step, when, 1e-3))
        found += [(2, rank, step, per_step * step, when, 0.5 + 0.25 * (rank == 1)) for rank in range(ranks)]
    return np.array(found, layout.ROW)


def note_lines(*notes):
    return b"".join(json.dumps(note).encode() + b"\n" for note in notes)


def run_id(name):
    """The id of the run of a file of this name."""
    return name.encode().hex().ljust(32, "0")


def put(
    path, rows=NONE, *, names=NAMES, notes=b"", facts=FACTS, spans=NO_SPANS, sequence=1, is_ended=True, dropped=0,
    started=STARTED, attributes=None, room=16,
):  # fmt: skip
    """A record of these elements; of each table as many as it has, and `room` more; returns offsets by name."""
    tables = {
        "rows": np.asarray(rows, layout.ROW).tobytes(),
        "names": "".join(f"{name}\n" for name in names).encode(),
        "notes": notes,
        "spans": np.asarray(spans, layout.SPAN).tobytes(),
    }
    counts = {name: len(raw) // layout.TABLES[name].itemsize for name, raw in tables.items()}
    own = {"run": run_id(path.name), "started": started, "host": "node1"} if attributes is None else attributes
    texts = {name: layout.fact(value) for name, value in facts.items()}
    places = layout.lay_out(path, own, texts, {name: count + room for name, count in counts.items()})
    checksums = {name: crc32c(raw) for name, raw in tables.items()}
    state = layout.State(sequence, counts, checksums, dropped, is_ended)
    with path.open("r+b") as file:
        for name, raw in tables.items():
            file.seek(places.offsets[name])
            file.write(raw)
        put_state(file, places, state)
    return places


def put_state(file, places, state):
    file.seek(places.offsets[layout.STATE] + state.place * layout.SLOT.itemsize)
    file.write(state.packed())
