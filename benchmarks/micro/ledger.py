"""What recording costs: nanoseconds of one record, records in a step of the example, and both by the step's time.

    mpispeed run -n 2 benchmarks/micro/ledger.py [--steps 40] [--json FILE]

A record is the whole of what a verb does beside communicating: the trace, and with an open recorder the row and who
called. The example is the GPT of docs/examples at its own size and settings, at ZeRO stages 1 and 3. Also shown: the
part of a core that the watchdog of this node takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "step"))
import peers
from gpt import GPT, Shape

import mpispeed
from mpispeed import comm
from mpispeed.mesh import Comm
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.collectives.group import Call

ROOT = Path(__file__).resolve().parents[2]
GOAL = 0.01
SHAPE = Shape(3, 4, 128, 128, 0.0)


def nanoseconds(group: Comm, calls: int = 20_000, rounds: int = 9) -> float:
    """Of one record, without its verb: the median of rounds."""
    x = torch.ones(8)
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            with Call(group.group, "all_reduce", 32, x, "sum"):
                pass
        times.append((time.perf_counter() - begin) / calls * 1e9)
    return statistics.median(times)


def cost_of_a_record(group: Comm) -> dict[str, float]:
    """With the recorder, without it, and of the loop's own `with`. Collective over: all ranks."""
    group.barrier()
    recorded = nanoseconds(group)
    inner = group.group
    channel, inner.sequence = inner.sequence, None
    journal_only = nanoseconds(group)
    inner.sequence = channel
    group.barrier()
    return {"record_ns": recorded, "journal_only_ns": journal_only}


def step_of_the_example(stage: int, steps: int) -> dict[str, float]:
    """Seconds of a step and records in it, on this rank. Collective over: all ranks."""
    settings: dict[str, Any] = json.loads((ROOT / "docs" / "examples" / "ds_config.json").read_text(encoding="utf-8"))
    for monitor in ("csv_monitor", "tensorboard"):
        settings[monitor]["enabled"] = False
    settings["zero_optimization"] = {"stage": stage}
    torch.manual_seed(0)
    engine, _, _, _ = mpispeed.initialize(model=GPT(SHAPE), config=settings)
    records = []
    end = engine.mesh.comm_trace.subscribe(records.append)
    micro = engine.train_micro_batch_size_per_gpu()
    times = []
    for _ in range(steps):
        x = torch.randint(0, 256, (micro, SHAPE.block))
        begin = time.perf_counter()
        loss = engine(x, x)
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - begin)
    end()
    engine.destroy()
    return {"step_seconds": statistics.median(times[3:]), "records": len(records) / steps}


def watchdog_core_seconds() -> float | None:
    """Seconds on a core that the watchdog of this node has taken so far; None if it is not found."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text().split("\0")
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if any("mpispeed.watchdog.watchdog" in word for word in words) and _is_ours(words):
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return None


def _is_ours(words: list[str]) -> bool:
    maps = Path("/proc/self/maps").read_text()
    return any("mpispeed-ledger-" in word and word in maps for word in words)


def main() -> None:
    """Measure, show on rank 0, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = mpispeed.init_distributed()
    results: dict[str, Any] = cost_of_a_record(world.comm)
    if recorders.current() is None:
        sys.exit("there is no ledger: start at least 2 ranks, without MPISPEED_WATCH=0")
    for stage in (1, 3):
        before, begin = watchdog_core_seconds(), time.perf_counter()
        found = step_of_the_example(stage, args.steps)
        after, seconds = watchdog_core_seconds(), time.perf_counter() - begin
        found["share"] = found["records"] * results["record_ns"] * 1e-9 / found["step_seconds"]
        if before is not None and after is not None:
            found["watcher_cores"] = (after - before) / seconds
        results[f"stage {stage}"] = found
    if comm.get_rank() == 0:
        print(f"record {results['record_ns']:.0f} ns, of the journal alone {results['journal_only_ns']:.0f} ns")
        for stage in (1, 3):
            found = results[f"stage {stage}"]
            print(
                f"stage {stage}: {found['records']:.1f} records in a step of {found['step_seconds'] * 1e3:.1f} ms: "
                f"{100 * found['share']:.4f} % (goal below {100 * GOAL:.0f} %); watchdog "
                f"{100 * found.get('watcher_cores', float('nan')):.2f} % of a core"
            )
        peers.write_record(args.json, "micro/ledger", {"ranks": world.size, "steps": args.steps, "goal": GOAL}, results)


if __name__ == "__main__":
    main()
