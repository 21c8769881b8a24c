"""What ranks on different hosts do: a mean over all ranks by MPI's all-reduce and by our compressed one, and the wire.

    python benchmarks/network/hosts.py --rate 1gbit benchmarks/network/exchange.py --mib 64

Contenders take turns inside every round and get the same fp32 values each time. `wire` sends all values to the next
rank, in a plain message, while as many come from the one before: the limit of the link. Bytes are counted twice: by
the trace, what ranks hand to MPI, and by the device's own counter. Before anything is timed, the compressed means
are compared: they have the same bits on all ranks and both ways. `compare.py` runs this over several links.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers
from turns import take_turns

from mpispeed.mesh.compressed.onebit import OneBitErrors, compressed_all_reduce

FP32_BYTES = 4
COMPRESSED = {"overlapped": True, "sequential": False}
CONTENDERS = ("wire", "mpi", *COMPRESSED)

Contender = Callable[[torch.Tensor], None]


def make_contenders(comm: Any, count: int, names: Sequence[str]) -> dict[str, Contender]:
    """The ways of these names. Each compressed one carries errors of its own."""
    incoming, after, before = torch.empty(count), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    counts, out_counts = ([count if peer == rank else 0 for peer in range(comm.size)] for rank in (after, before))
    plain: dict[str, Contender] = {
        "wire": lambda x: comm.all_to_all(incoming, x, out_counts, counts),
        "mpi": lambda x: comm.all_reduce(x, "avg"),
    }
    return {name: _compressed(comm, count, COMPRESSED[name]) if name in COMPRESSED else plain[name] for name in names}


def _compressed(comm: Any, count: int, is_overlapped: bool) -> Contender:
    errors = OneBitErrors.zeros(count, comm.size)
    return lambda x: compressed_all_reduce(comm, x, errors, overlapped=is_overlapped)


def check_same(comm: Any, contenders: dict[str, Contender], source: torch.Tensor) -> None:
    """Refuse compressed means that are not the same on all ranks and by both ways. Collective over: all ranks."""
    digests = []
    for name in [name for name in contenders if name in COMPRESSED]:  # a set would have another order on each rank
        x = source.clone()
        contenders[name](x)
        digests.append(hashlib.sha256(x.numpy().data).hexdigest())
    found = comm.gather_objects(digests)
    if len({digest for of_rank in found for digest in of_rank}) > 1:
        msg = f"compressed means differ; by rank: {found}"
        raise RuntimeError(msg)


def main() -> None:
    """Measure, and print or write the figures of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=64, help="size of the fp32 values")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--json", type=Path, help="write the figures here instead of printing them")
    options = parser.parse_args()
    world = peers.join()
    count = int(options.mib * 2**20) // FP32_BYTES
    source = torch.randn(count, generator=torch.Generator().manual_seed(world.rank))
    contenders = make_contenders(world.comm, count, options.only)
    check_same(world.comm, contenders, source)
    x = source.clone()
    runs = {name: functools.partial(run, x) for name, run in contenders.items()}
    for run in runs.values():
        run()
    figures = take_turns(world, runs, options.rounds, lambda: x.copy_(source))
    if world.rank:
        return
    if options.json:
        options.json.write_text(json.dumps(figures))
    else:
        for name, of_one in figures.items():
            print(f"{name:12s} {statistics.median(of_one['seconds']):8.4f} s   {of_one['device']:.0f} bytes by device")


if __name__ == "__main__":
    main()
