"""The update of Muon beside the work of the owner with most of it, in turns, one thread each.

    mpispeed run -n 2 benchmarks/step/muon_update.py --json benchmarks/results/muon-update.json

All matrices of a GPT are updated; `update` is the part of a step that updates states and masters (AdamW's for other
parameters, momenta, messages to owners and back, masters), `share` the Newton-Schulz iteration alone on matrices of the
shapes that a rank owns, on all ranks at once, so that both have the same company. A ratio of 1.1 is the aim.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import torch

from mpispeed.engine.matrix_update import MatrixUpdate

MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3}}


class Timed:
    """A part of a step, with the seconds of its last call on the slowest rank."""

    def __init__(self, part: MatrixUpdate, barrier: Callable[[], None]) -> None:
        self.part, self._barrier, self.seconds = part, barrier, 0.0

    def __call__(self, ctx: Any) -> None:
        """Collective over: all ranks."""
        self._barrier()
        start = time.perf_counter()
        self.part(ctx)
        self._barrier()
        self.seconds = time.perf_counter() - start


def share(part: MatrixUpdate, barrier: Callable[[], None]) -> float:
    """Seconds of the slowest rank for matrices as it owns them. Collective over: all ranks."""
    rule, found = part._matrixwise, []
    for group in part.found:
        for at, owner in enumerate(group.ownership.owners):
            if owner == group.me:
                found.append(torch.randn(group.matrices[at].shape[1:]).to(group.dtype))
    barrier()
    start = time.perf_counter()
    for matrix in found:
        rule.orthogonal(matrix, {})
    barrier()
    return time.perf_counter() - start


def main() -> None:
    """Measure each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=peers.SIZES, default="82m")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    world, shape = peers.join(), peers.SIZES[options.size]
    barrier, results = world.comm.barrier, {}
    for stage in options.stages:
        torch.manual_seed(3)
        model = peers.GPT(*shape[:4])
        engine = peers.make_engine(model, shape[4], {"stage": stage}, optimizer=MUON)
        parts = engine.mpispeed.parts.updates._parts
        at = next(at for at, part in enumerate(parts) if isinstance(part, MatrixUpdate))
        timed = Timed(parts[at], barrier)
        engine.mpispeed.parts.updates._parts = [*parts[:at], timed, *parts[at + 1 :]]
        step, ids = peers.engine_step(engine), peers.token_ids(shape, shape[4] // world.size, world.rank)
        step(ids)
        rows = []
        for _ in range(options.rounds):
            step(ids)
            rows.append((timed.seconds, share(timed.part, barrier)))
        update, own = (statistics.median(column) for column in zip(*rows, strict=True))
        ratio = statistics.median(one / other for one, other in rows)
        imbalance = max(group.ownership.imbalance for group in timed.part.found)
        results[f"stage {stage}"] = {
            "update_seconds": update, "share_seconds": own, "ratio": ratio, "imbalance": imbalance, "rounds": rows
        }  # fmt: skip
        engine.destroy()
        if world.rank == 0:
            line = f"stage {stage}: update {update:.3f} s, largest share {own:.3f} s, ratio {ratio:.3f}"
            print(f"{line}, shares within {imbalance:.3f} of equal ones", flush=True)
    if world.rank == 0:
        kept = {"size": options.size, "ranks": world.size, "rounds": options.rounds}
        peers.write_record(options.json, "step/muon_update", kept, results)


if __name__ == "__main__":
    main()
