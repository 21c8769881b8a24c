"""Microseconds of a small started all_gather: one at a time, and 32 in a row before the first wait.

    mpirun -n 2 python benchmarks/micro/started.py [--repeat 7] [--count 300]

Per size the median over `--repeat` runs of `--count` operations, each run as slow as its slowest rank.
Sizes are bytes of a rank's shard.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from mpispeed.mesh import Comm, Mesh, Topology, start

SIZES = (4, 256, 4096, 65536)
IN_A_ROW = 32


def microseconds(comm: Comm, fn: Callable[[], object], operations: int, repeat: int) -> float:
    """Median time of one operation. Collective over: `comm`."""
    fn()
    times = []
    for _ in range(repeat):
        comm.barrier()
        begin = time.perf_counter()
        fn()
        times.append(max(comm.gather_objects(time.perf_counter() - begin)) / operations * 1e6)
    return statistics.median(times)


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--count", type=int, default=300)
    args = parser.parse_args()
    world = start("ordered")
    mesh = Mesh(Topology({"data": world.size}), world)
    channel = mesh.channel("params")["data"]
    for size in SIZES:
        shard = torch.zeros(size // 4)
        outs = [torch.zeros(size // 4 * world.size) for _ in range(IN_A_ROW)]

        def alone(shard: torch.Tensor = shard, out: torch.Tensor = outs[0]) -> None:
            for _ in range(args.count):
                channel.start_all_gather(out, shard).wait()

        def row(shard: torch.Tensor = shard, outs: list[torch.Tensor] = outs) -> None:
            for _ in range(args.count // IN_A_ROW):
                for work in [channel.start_all_gather(out, shard) for out in outs]:
                    work.wait()

        single = microseconds(world.comm, alone, args.count, args.repeat)
        queued = microseconds(world.comm, row, args.count // IN_A_ROW * IN_A_ROW, args.repeat)
        if world.rank == 0:
            print(f"{world.size} ranks, {size:>6} bytes: one at a time {single:8.1f} us, in a row {queued:8.1f} us")
    mesh.close()


if __name__ == "__main__":
    main()
