"""Step time with states in swap files: pipelined, not pipelined, and beside what the same disk can do, in one run.

    mpispeed run -n 1 benchmarks/step/offload.py --path FOLDER --json benchmarks/results/offload.json

Every contender trains the same model; they take turns inside every round. "optimizer" keeps masters, gradients and
optimizer state in swap files below FOLDER, "all" keeps parameters there too. In the same rounds the disk alone moves
the bytes of one update, window by window with the same block I/O: reads and writes in turns (what an update without
pipeline has to wait for), and both at once (the best that a pipeline can come to on this disk).
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import peers
import torch
from stack import Stack

from mpispeed.native.block_io import BlockFile, BlockIO, aligned

CONTENDERS = {
    "memory": (False, False, False),
    "optimizer": (True, False, False),
    "optimizer, pipelined": (True, False, True),
    "all": (True, True, False),
    "all, pipelined": (True, True, True),
}


def settings_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The section zero_optimization of a contender."""
    is_swapped, has_params, is_pipelined = CONTENDERS[name]
    section: dict[str, Any] = {
        "stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": options.window,
    }  # fmt: skip
    tier = {"device": "nvme", "nvme_path": str(options.path)}
    if is_swapped:
        pipeline = {"pipeline_read": is_pipelined, "pipeline_write": is_pipelined}
        section["offload_optimizer"] = {**tier, **pipeline, "buffer_count": 12}
    if has_params:
        section["offload_param"] = {**tier, "max_in_cpu": 0}
    return section


def make_disk(options: argparse.Namespace, elements: int) -> dict[str, Any]:  # noqa: C901
    """The bytes of one update of `elements` parameters by the disk alone: in turns, and both ways at once."""
    window, io = options.window * 4, BlockIO()
    file = BlockFile(Path(options.path) / "disk-alone.bin", create=True)
    Path(file.path).unlink()
    reads, writes = 4, 3  # master, gradient and two moments; all but the gradient back
    count = max(-(-elements * 4 // window), 1)
    file.allocate(count * window * reads)
    buffers = [aligned(window) for _ in range(reads + writes)]
    for k in range(count * reads):
        io.write(file, buffers[0], k * window).wait()

    def in_turns() -> None:
        for k in range(count):
            for work in [io.read(file, buffers[i], (k * reads + i) * window) for i in range(reads)]:
                work.wait()
            for work in [io.write(file, buffers[i], (k * reads + i) * window) for i in range(writes)]:
                work.wait()

    def at_once() -> None:
        under_way: list[Any] = []
        for k in range(count):
            works = [io.read(file, buffers[i], (k * reads + i) * window) for i in range(reads)]
            under_way.extend(works)
            if k:
                spare = buffers[reads:]
                under_way.extend(io.write(file, spare[i], ((k - 1) * reads + i) * window) for i in range(writes))
            for work in under_way:
                work.wait()
            under_way.clear()
        for work in [io.write(file, buffers[i], ((count - 1) * reads + i) * window) for i in range(writes)]:
            work.wait()

    return {"disk alone, in turns": in_turns, "disk alone, both ways": at_once}


def timed_step(engine: Any, x: torch.Tensor, updates: list[float]) -> None:
    """One training step; the time of its update goes to `updates`."""
    engine.backward(engine(x))
    start = time.perf_counter()
    engine.step()
    updates.append(time.perf_counter() - start)


def main() -> None:
    """Run all contenders and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="folder on the disk")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--window", type=int, default=1 << 20, help="sub_group_size, elements")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    world = peers.join()
    x = torch.randn(options.rows, options.width, generator=torch.Generator().manual_seed(10 + world.rank))
    steps, updates, losses = {}, {}, {}
    for name in CONTENDERS:
        torch.manual_seed(1)
        model = Stack(options.layers, options.width)
        engine = peers.make_engine(model, options.rows * world.size, settings_of(name, options), bf16={"enabled": True})
        updates[name] = []
        steps[name] = functools.partial(timed_step, engine, x.bfloat16(), updates[name])
        losses[name] = engine
    elements = options.layers * (options.width**2 + options.width) // world.size
    steps |= make_disk(options, elements)
    seconds = peers.take_turns(steps, world.comm.barrier, options.rounds, 1)
    final = {name: float(engine(x.bfloat16()).detach()) for name, engine in losses.items()}
    if world.rank == 0:
        _report(options, seconds, updates, final, world.size)


def _report(
    options: argparse.Namespace, seconds: dict[str, list[float]], updates: dict[str, list[float]],
    losses: dict[str, float], ranks: int,
) -> None:  # fmt: skip
    figures: dict[str, Any] = {}
    for name, times in seconds.items():
        update = statistics.median(updates[name]) if name in updates else None
        figures[name] = {"seconds": times, "update_seconds": update, "loss": losses.get(name)}
        text = f"update {1000 * update:8.0f} ms" if update else ""
        print(f"{name:24s} {1000 * statistics.median(times):8.0f} ms   {text}")
    for kind in ("optimizer", "all"):
        on, off = f"{kind}, pipelined", kind
        speed = statistics.median(seconds[off]) / statistics.median(seconds[on])
        update = statistics.median(updates[off]) / statistics.median(updates[on])
        # With everything hidden a step takes what computing takes, and the disk for one update, both ways at once.
        rest = statistics.median(seconds["memory"]) - statistics.median(updates["memory"])
        least = rest + statistics.median(seconds["disk alone, both ways"])
        bound = statistics.median(seconds[off]) / least
        figures[on] |= {"step_speed_up": speed, "update_speed_up": update, "most_step_speed_up": bound}
        print(
            f"{kind}: pipelined steps are {speed:.2f}x as fast, updates {update:.2f}x; with all computing hidden this "
            f"disk would allow steps {bound:.2f}x as fast"
        )
    alone = {name: statistics.median(seconds[name]) for name in seconds if name.startswith("disk")}
    most = alone["disk alone, in turns"] / alone["disk alone, both ways"]
    print(f"the disk alone: both ways at once is {most:.2f}x as fast as in turns")
    print(f"losses equal: {len(set(losses.values())) == 1}")
    settings = {key: getattr(options, key) for key in ("layers", "width", "rows", "window", "rounds")}
    settings["ranks"] = ranks
    peers.write_record(options.json, "step/offload", settings, figures | {"disk_speed_up": most})


if __name__ == "__main__":
    main()
