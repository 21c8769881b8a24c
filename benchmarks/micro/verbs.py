"""Verbs of a mesh in GB/s of user data, beside plain mpi4py on the same tensors in the same run.

    mpirun -n 2 python benchmarks/micro/verbs.py [--mib 64] [--repeat 5] [--json FILE]

Columns: `mpi4py` is the library's own collective; `messages` is the ordered path without shared memory;
`mpispeed` is what a program gets. The last lines time a sum, a matrix product, and both with the sum
started before: once as it is (on one node the copies of the sum need the cores of the product), and once
with a sum that takes 50 ms longer without using a core, like one over a slow network.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpi4py import MPI

from mpispeed.mesh import Comm, Mesh, Topology, start


def best_seconds(comm: Comm, fn: Callable[[], object], repeat: int) -> float:
    """Best of `repeat` runs, each as slow as its slowest rank. Collective over: `comm`."""
    fn()
    times = []
    for _ in range(repeat):
        comm.barrier()
        begin = time.perf_counter()
        fn()
        times.append(max(comm.gather_objects(time.perf_counter() - begin)))
    return min(times)


def verbs(comm: Comm, count: int, dtype: torch.dtype) -> dict[str, dict[str, Callable[[], object]]]:
    """Verb -> column -> call."""
    x, y = torch.ones(count, dtype=dtype), torch.zeros(count, dtype=dtype)
    cut = count // comm.size
    shard, world = torch.zeros(cut, dtype=dtype), MPI.COMM_WORLD
    table: dict[str, dict[str, Callable[[], object]]] = {
        "all_reduce": {"mpispeed": lambda: comm.all_reduce(y)},
        "reduce_scatter": {"mpispeed": lambda: comm.reduce_scatter(shard, x)},
        "all_gather": {"mpispeed": lambda: comm.all_gather(y, shard)},
        "all_to_all": {"mpispeed": lambda: comm.all_to_all(y, x)},
        "broadcast": {"mpispeed": lambda: comm.broadcast(y)},
    }
    if dtype == torch.float32:
        a, b, s = x.numpy(), y.numpy(), shard.numpy()
        table["all_reduce"]["mpi4py"] = lambda: world.Allreduce(MPI.IN_PLACE, b)
        table["reduce_scatter"]["mpi4py"] = lambda: world.Reduce_scatter_block(a, s)
        table["all_gather"]["mpi4py"] = lambda: world.Allgather(s, b)
        table["all_to_all"]["mpi4py"] = lambda: world.Alltoall(a, b)
        table["broadcast"]["mpi4py"] = lambda: world.Bcast(b)
    return table


def overlap(mesh: Mesh, count: int, repeat: int, wire_seconds: float) -> dict[str, float]:
    """Seconds of a sum, of a product, and of both at once. Collective over: all ranks."""
    comm, x, a = mesh["data"], torch.zeros(count), torch.rand(768, 768)

    def total(group: Comm) -> None:
        time.sleep(wire_seconds)
        group.all_reduce(x)

    def compute() -> None:
        for _ in range(12):
            torch.mm(a, a)

    def both() -> None:
        work = comm.start(total)
        compute()
        work.wait()

    calls = {"sum": lambda: total(comm), "product": compute, "both": both}
    return {name: best_seconds(mesh.world.comm, fn, repeat) for name, fn in calls.items()}


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world = start("ordered")
    mesh = Mesh(Topology({"data": world.size}), world)
    plain = mesh["data"].duplicate()
    plain.transport.fast = lambda **_: None  # type: ignore[method-assign]
    results: dict[str, dict[str, float]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        count = int(args.mib * 2**20) // dtype.itemsize // world.size * world.size
        slow = verbs(plain, count, dtype)
        for verb, columns in verbs(mesh["data"], count, dtype).items():
            if verb in ("all_reduce", "reduce_scatter", "all_gather"):
                columns["messages"] = slow[verb]["mpispeed"]
            seconds = {name: best_seconds(world.comm, fn, args.repeat) for name, fn in columns.items()}
            key = f"{verb} {str(dtype).removeprefix('torch.')}"
            results[key] = {name: count * dtype.itemsize / s / 1e9 for name, s in seconds.items()}
    count = int(args.mib * 2**20) // 4
    hidden = {wire: overlap(mesh, count, args.repeat, seconds) for wire, seconds in (("node", 0.0), ("slow", 0.05))}
    mesh.close()
    if world.rank == 0:
        print(f"{world.size} ranks, {args.mib:g} MiB, GB/s (size of the whole tensor / time), best of {args.repeat}")
        for key, row in results.items():
            print(f"{key:<26}" + "".join(f"  {name} {rate:7.2f}" for name, rate in sorted(row.items())))
        for wire, row in hidden.items():
            print(f"overlap, {wire} wire, ms: " + ", ".join(f"{k} {s * 1e3:.1f}" for k, s in row.items()))
        if args.json:
            args.json.write_text(json.dumps({"ranks": world.size, "gb_per_second": results, "overlap": hidden}))


if __name__ == "__main__":
    main()
