"""Rounds in which contenders take turns, with what each sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import hosts


def take_turns(
    world: Any,
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Per contender: seconds until the slowest rank has ended, and bytes this rank sent, by trace and by device.

    Seconds are those of each round, bytes medians over rounds; `prepare` runs before every turn and is not timed.

    Collective over: all ranks, which have to be on different hosts.
    """
    if world.node_count != world.size:
        msg = f"{world.size} ranks are on {world.node_count} nodes; start them by hosts.py, one on each host"
        raise RuntimeError(msg)
    figures = {name: {"seconds": [], "journal": [], "device": []} for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            prepare()
            world.comm.barrier()
            sent = world.comm_trace.total_bytes(), hosts.sent_bytes()
            start = time.perf_counter()
            run()
            world.comm.barrier()
            figures[name]["seconds"].append(time.perf_counter() - start)
            figures[name]["journal"].append(world.comm_trace.total_bytes() - sent[0])
            figures[name]["device"].append(hosts.sent_bytes() - sent[1])
    return {
        name: {"seconds": found["seconds"], **{of: statistics.median(found[of]) for of in ("journal", "device")}}
        for name, found in figures.items()
    }


def spread(times: list[float]) -> float:
    """Range over median."""
    return (max(times) - min(times)) / statistics.median(times)
