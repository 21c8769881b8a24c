"""Block I/O beside fio, on the same folder, with the same block, depth and file size.

    python benchmarks/micro/block_io.py [--folder .] [--mib 1024] [--block-mib 1] [--depth 8] [--output FILE]

The kernel queue stands beside fio's libaio engine and the pool of system calls beside its psync engine with
as many jobs, all with O_DIRECT and in turn in every round; medians and ratios are shown. Shared disks vary:
look at the spread, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mpispeed.native.block_io import BlockFile, BlockIO, Options, aligned, probe

PAIRS = {"queue": "fio libaio", "threads": "fio psync", "uring": "fio libaio"}


def fio_seconds(folder: Path, op: str, engine: str, options: argparse.Namespace) -> float:
    """Seconds in which fio moves the file once."""
    jobs = options.depth if engine == "psync" else 1
    total = options.mib << 20
    words = [
        "fio", "--name=job", f"--rw={op}", f"--ioengine={engine}", "--direct=1", f"--bs={options.block_mib}M",
        f"--iodepth={1 if engine == 'psync' else options.depth}", f"--numjobs={jobs}", f"--size={total // jobs}",
        f"--filename={folder / 'fio'}", f"--offset_increment={total // jobs}", "--group_reporting", "--thread",
        "--invalidate=1", "--fallocate=none", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    row = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][op]
    return total / row["bw_bytes"]


def own_seconds(io: BlockIO, file: BlockFile, buffer: torch.Tensor, op: str) -> float:
    """Seconds in which one transfer moves the file."""
    begin = time.perf_counter()
    getattr(io, op)(file, buffer).wait()
    return time.perf_counter() - begin


def candidates(
    folder: Path,
    op: str,
    options: argparse.Namespace,
    handles: dict[str, BlockIO],
    file: BlockFile,
    buffer: torch.Tensor,
) -> dict[str, Callable[[], float]]:
    """Name -> call that gives seconds."""
    calls: dict[str, Callable[[], float]] = {}
    for name, io in handles.items():
        calls[name] = lambda io=io: own_seconds(io, file, buffer, op)
    for engine in ("libaio", "psync"):
        calls[f"fio {engine}"] = lambda engine=engine: fio_seconds(folder, op, engine, options)
    return calls


def measure(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Operation -> name -> figures."""
    total = options.mib << 20
    buffer = aligned(total).random_(0, 256)
    common = {"block_size": options.block_mib << 20, "queue_depth": options.depth}
    handles = {name: BlockIO(Options(**common, backend=name)) for name in options.backends}
    rows: dict[str, dict[str, dict[str, float]]] = {}
    with BlockFile(folder / "fio", create=True) as file:  # one file for all: places on a disk differ in speed
        if not file.is_direct:
            sys.exit(f"{folder}: {probe(folder).direct_reason}; choose a --folder on a disk")
        file.allocate(total)
        for op in ("write", "read"):
            calls = candidates(folder, op, options, handles, file, buffer)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(options.rounds + 1):
                order = list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]
                for name in order:
                    took = calls[name]()
                    if turn:  # the first round makes extents and touches pages
                        seconds[name].append(took)
            rates = {name: [total / 2**20 / took for took in times] for name, times in seconds.items()}
            median = {name: statistics.median(values) for name, values in rates.items()}
            rows[op] = {
                name: {"MiB_per_second": median[name], "least": min(values), "most": max(values)}
                for name, values in rates.items()
            }
            for name in handles:
                rows[op][name]["of_fio"] = median[name] / median[PAIRS[name]]
    for io in handles.values():
        io.close()
    return rows


def main() -> None:
    """Measure, print a table, and write it with machine and date when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--block-mib", type=int, default=1)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=["queue", "threads"], choices=sorted(PAIRS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio is not on PATH; it is the Debian package fio: apt-get install fio")
    if (options.mib // options.block_mib) % options.depth:
        sys.exit("--mib has to be a multiple of --block-mib times --depth, so that the jobs of fio are equal")
    with tempfile.TemporaryDirectory(prefix="block-io-", dir=options.folder) as folder:
        rows = measure(Path(folder), options)
    print(f"{options.mib} MiB, blocks of {options.block_mib} MiB, depth {options.depth}, {options.rounds} rounds")
    for op, found in rows.items():
        for name, row in found.items():
            ratio = f"{row['of_fio']:6.2f} of {PAIRS[name]}" if "of_fio" in row else ""
            spread = f"({row['least']:.0f} to {row['most']:.0f})"
            print(f"{op:6} {name:11} {row['MiB_per_second']:8.0f} MiB/s {spread:16} {ratio}")
    if options.output:
        header = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.processor() or platform.machine(),
            "kernel": platform.release(),
            "mib": options.mib,
            "block_mib": options.block_mib,
            "depth": options.depth,
            "rounds": options.rounds,
        }
        options.output.write_text(json.dumps({**header, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
