"""Share of the transfer of keys and values that a ring of two hosts hides behind attention, forward and backward.

    python benchmarks/network/ring.py --rate 1gbit --json benchmarks/results/ring.json

Each rank is on a host of its own (see hosts.py) and computes with one thread. Contenders take turns in every round:
`ring` is the attention of a shared sequence; `compute` is the same pieces of the same blocks with all of them in this
rank's memory; `transfer` is the messages of the ring alone, as they are posted. Hidden is 1 - (ring - compute) /
transfer, of medians; `hidden_at_best` is of the shortest times, for a machine that does other work too. Times are from
a barrier to the next. Backward sends the blocks once more and fp32 sums of gradients after them. Where `compute` is
less than `transfer` it cannot all be hidden; such lengths are shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import hosts
import peers
from turns import spread, take_turns

from mpispeed.nn.attention.core import begin, run, run_backward
from mpispeed.nn.sequence import Layout
from mpispeed.nn.sequence.ring import cached_pieces, halves, ring_attention

PASSES = ("forward", "backward")
GOAL = 0.7


class Case:
    """One layer's attention at one length: its tensors and its contenders."""

    def __init__(self, comm: Any, options: argparse.Namespace, length: int) -> None:
        self.comm, self.layout = comm, Layout(length, 1, comm.size)
        self.causal, count = not options.full, self.layout.ring_count(comm.rank)
        draws = torch.Generator().manual_seed(comm.rank)
        dtype = getattr(torch, options.dtype)

        def make(heads: int) -> torch.Tensor:
            return torch.randn(1, heads, count, options.width, generator=draws).to(dtype)

        self.q, self.grad = make(options.heads), make(options.heads)
        self.k, self.v = make(options.kv_heads), make(options.kv_heads)
        self.leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        self.block = torch.stack((self.k, self.v))
        self.out = torch.empty(0)
        self.lse = torch.empty(0)
        self.sums = torch.zeros(self.block.shape)

    def forward(self) -> dict[str, Callable[[], object]]:
        """Contenders of the forward pass."""
        return {"ring": self._ring, "compute": self._compute, "transfer": lambda: self._pass(self.block)}

    def backward(self) -> dict[str, Callable[[], object]]:
        """Contenders of the backward pass; the ring's forward pass is not timed."""
        return {"ring": self._ring_backward, "compute": self._compute_backward, "transfer": self._pass_back}

    def prepare(self) -> None:
        """A graph whose backward pass can be timed."""
        self._ring()

    def pieces(self, src: int) -> Any:
        """What own queries see of the block of `src`."""
        ranges = self.layout.ring_ranges
        return cached_pieces(ranges(self.comm.rank), ranges(src), self.causal, None)

    def _ring(self) -> None:
        self.result = ring_attention(*self.leaves, self.comm, self.layout, causal=self.causal)

    def _ring_backward(self) -> None:
        self.result.backward(self.grad)

    def _compute(self) -> None:
        sums = begin(self.q)
        for turn in range(self.comm.size):
            run(self.q, self.k, self.v, self.pieces((self.comm.rank - turn) % self.comm.size), into=sums)
        self.out, self.lse = sums[0].to(self.q.dtype), sums[1]

    def _compute_backward(self) -> None:
        if not self.lse.numel():
            self._compute()
        into = tuple(torch.zeros(x.shape) for x in (self.q, self.k, self.v))
        for turn in range(self.comm.size):
            found = self.pieces((self.comm.rank - turn) % self.comm.size)
            for part in (found,) if turn else halves(found):
                run_backward(self.grad, self.q, self.k, self.v, self.out, self.lse, part, into=into)

    def _pass(self, x: torch.Tensor) -> None:
        comm, arriving = self.comm, torch.empty_like(x)
        for _ in range(comm.size - 1):
            works = [
                comm.start_recv(arriving.view(-1), (comm.rank - 1) % comm.size, 7),
                comm.start_send(x.view(-1), (comm.rank + 1) % comm.size, 7),
            ]
            for work in works:
                work.wait()

    def _pass_back(self) -> None:
        self._pass(self.block)
        self._pass(self.sums)


def measure(options: argparse.Namespace) -> None:
    """The job: every length, forward and backward."""
    world = peers.join()
    comm = world.comm  # its started messages have a thread that drives them, as groups of a mesh have
    found: dict[str, Any] = {}
    for length in options.lengths:
        case = Case(comm, options, length)
        for name in PASSES:
            contenders = getattr(case, name)()
            case.prepare()
            for run_once in contenders.values():
                run_once()
            times = take_turns(world, contenders, options.rounds, case.prepare if name == "backward" else lambda: None)
            found.setdefault(str(length), {})[name] = times
    if world.rank == 0:
        options.json.write_text(json.dumps(found))


def summary(times: dict[str, Any]) -> dict[str, Any]:
    """Medians, and what is hidden; None where attention takes less than the transfer."""
    medians = {name: statistics.median(row["seconds"]) for name, row in times.items()}
    best = {name: min(row["seconds"]) for name, row in times.items()}
    hidden, at_best = (1 - (of["ring"] - of["compute"]) / of["transfer"] for of in (medians, best))
    return {
        **{f"{name}_seconds": round(value, 4) for name, value in medians.items()},
        "spread": round(max(spread(row["seconds"]) for row in times.values()), 3),
        "sent_bytes": times["ring"]["journal"],
        "hidden": round(hidden, 3),
        "hidden_at_best": round(at_best, 3),
        "can_hide_all": medians["compute"] >= medians["transfer"],
    }


def main() -> None:
    """Make the hosts, run the job on them, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--full", action="store_true", help="attention that is not causal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder, hosts.joined_hosts(2, options.rate) as joined:
        output = Path(folder) / "figures.json"
        words = [word for word in sys.argv[1:] if not word.startswith("--json")]
        if options.json:
            words.remove(str(options.json))
        status = joined.run([__file__, *words, "--job", "--json", str(output)], 1, 580)
        if status:
            sys.exit(status)
        figures = json.loads(output.read_text())
    results = {length: {name: summary(times) for name, times in row.items()} for length, row in figures.items()}
    for length, row in results.items():
        for name, one in row.items():
            print(f"{length:>8s} {name:9s} {one}")
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "job")}
    peers.write_record(options.json, "network/ring", asked, results)
    reached = [one["hidden"] for row in results.values() for one in row.values() if one["can_hide_all"]]
    print(
        f"least share hidden where attention takes as long as its transfer: {min(reached, default=None)}, goal {GOAL}"
    )


if __name__ == "__main__":
    main()
