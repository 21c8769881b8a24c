"""What a run record costs a step: microseconds with the record on and off, in turn, and of what is handed over.

    mpispeed run -n 2 benchmarks/record/overhead.py [--folder DIR] [--json FILE]

Rounds of steps of a tiny model, whose step is nearly nothing else, alternate between an engine with a record and one
without. Beside the time that a step takes stands the time that its thread computes, which other work on the machine
changes less. --folder says where the record is, so that a slow file system can be tried.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
import peers

import mpispeed
from mpispeed.record.layout import ROW
from mpispeed.record.writer import RecordWriter

STEPS = 200
ROUNDS = 15
KINDS = ("clock", "computing")


def engine(section: dict[str, Any]) -> Any:
    """An engine of a tiny model; its optimizer changes nothing that the time depends on."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "run_record": section,
    }
    return mpispeed.initialize(model=torch.nn.Linear(8, 8), config=settings)[0]


def step_microseconds(trained: Any) -> tuple[float, float]:
    """Of one step, as a clock and as this thread's own time. Collective over: all ranks."""
    batch = torch.ones(1, 8)
    trained.mesh.world.comm.barrier()
    began, computed = time.perf_counter(), time.thread_time()
    for _ in range(STEPS):
        trained.backward(trained(batch).sum())
        trained.step()
    return (time.perf_counter() - began) / STEPS * 1e6, (time.thread_time() - computed) / STEPS * 1e6


def measure_steps(folder: str) -> dict[str, Any]:
    """Steps with and without a record, in turn. Collective over: all ranks."""
    on, off = engine({"enabled": True, "path": folder}), engine({"enabled": False})
    for trained in (on, off):
        step_microseconds(trained)
    times: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    for number in range(ROUNDS):
        for name in ("on", "off") if number % 2 else ("off", "on"):
            times[name].append(step_microseconds(on if name == "on" else off))
    on.destroy()
    off.destroy()
    results: dict[str, Any] = {}
    for place, kind in enumerate(KINDS):
        own = {name: [both[place] for both in found] for name, found in times.items()}
        differences = [one - other for one, other in zip(own["on"], own["off"], strict=True)]
        results |= {f"{kind}_{name}_us": statistics.median(values) for name, values in own.items()}
        results |= {f"{kind}_more_us": statistics.median(differences), f"{kind}_more_each_us": differences}
    return results


def measure_calls(folder: str) -> dict[str, Any]:
    """A point and an array of 256 ranks' points, as a caller sees them, and what the thread writes in a second."""
    record = RecordWriter(folder, {})
    began = time.perf_counter()
    for step in range(50_000):
        record.row("loss", 1.0, step=step, samples=step)
    row = (time.perf_counter() - began) / 50_000 * 1e6
    array = np.zeros(5 * 256, ROW)
    began = time.perf_counter()
    for _ in range(50):
        record.rows(array)
    rows = (time.perf_counter() - began) / 50 * 1e6
    began = time.perf_counter()
    record.close()
    return {"row_us": row, "rows_of_256_ranks_us": rows, "close_ms": (time.perf_counter() - began) * 1e3}


def main() -> None:
    """Measure, show on rank 0, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = mpispeed.init_distributed()
    with tempfile.TemporaryDirectory(dir=args.folder) as own:
        results = measure_steps(world.comm.share(own))
        if world.rank == 0:
            results |= measure_calls(own)
            clock, computing = ([results[f"{kind}_{name}_us"] for name in ("off", "more")] for kind in KINDS)
            print(
                f"{world.size} ranks: a step takes {clock[0]:.0f} us without a record, {clock[1]:+.1f} us with one; "
                f"its thread computes {computing[0]:.0f} us, {computing[1]:+.1f} us with one; a point "
                f"{results['row_us']:.2f} us, those of 256 ranks {results['rows_of_256_ranks_us']:.0f} us"
            )
            peers.write_record(args.json, "record/overhead", {"ranks": world.size, "steps": STEPS}, results)
        world.comm.barrier()


if __name__ == "__main__":
    main()
