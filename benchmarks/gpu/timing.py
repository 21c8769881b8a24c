"""What the benchmarks on a GPU share: device times in turns, the bandwidth of a copy, the record.

    seconds = interleaved({"ours": ours, "torch": theirs})     median device seconds of one call
    copy = copy_bandwidth()                                    bytes a second, read and written
    fraction = moved_bytes / seconds["ours"] / copy

Every script calls `need_gpu` first: without a GPU it ends with exit code 2 and says why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.native.cuda import launcher

RESULTS = Path(__file__).resolve().parent.parent / "results"

Call = Callable[[], object]


def need_gpu() -> torch.device:
    """The current device; without one that runs kernels the script ends here with exit code 2."""
    reason = launcher.unusable_reason()
    if reason:
        print(f"{Path(sys.argv[0]).name}: no GPU to measure on: {reason}", file=sys.stderr)
        sys.exit(2)
    return torch.device("cuda", torch.cuda.current_device())


def count(word: str) -> int:
    """A number of rounds."""
    found = int(word)
    if found < 1:
        msg = f"{found} rounds measure nothing; at least 1"
        raise argparse.ArgumentTypeError(msg)
    return found


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser with what all scripts take: `--rounds`, and `--json FILE` instead of the folder of results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--json", type=Path, help="where the record goes; benchmarks/results when it is not given")
    return parser


def interleaved(
    calls: Mapping[str, Call],
    rounds: int = 20,
    *,
    repeats: int = 1,
    warm_up: int = 3,
    is_device_only: bool = False,
    enqueue_seconds: float = 5e-5,
) -> dict[str, float]:
    """Median seconds of one call of each, between CUDA events; all run in turn in every round.

    In one turn a call runs `repeats` times; take more than one for calls below 0.1 ms, on buffers larger than the L2
    cache or in turn on several. With `is_device_only` the device first sleeps while the calls are enqueued, so that
    only the work of the device counts, and no time that the host takes to launch it, which is at most `enqueue_seconds`
    a call.
    """
    if rounds < 1 or repeats < 1:
        msg = f"rounds is {rounds} and repeats {repeats}; both must be at least 1"
        raise ValueError(msg)
    for _ in range(warm_up):
        for call in calls.values():
            call()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_timed(call, repeats, enqueue_seconds if is_device_only else 0.0))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _timed(call: Call, repeats: int, enqueue_seconds: float) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if enqueue_seconds:
        torch.cuda._sleep(
            2_000_000 + int(2e9 * enqueue_seconds) * repeats
        )  # clock cycles: 1 ms, and that for each call
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def enqueued(calls: Mapping[str, Call], rounds: int = 20) -> dict[str, float]:
    """Median seconds that the host needs for one call of each onto an idle device; all run in turn in every round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - began)
    torch.cuda.synchronize()
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def copy_bandwidth(mib: int = 4096, rounds: int = 20) -> float:
    """Bytes a second, read and written, of a copy from one buffer of the device to another.

    The better of torch's `copy_` and of its elementwise kernel: what a kernel of one read and one write can reach.
    """
    source = torch.ones(mib << 18, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    seconds = interleaved(
        {"copy_": lambda: target.copy_(source), "mul": lambda: torch.mul(source, 2.0, out=target)}, rounds
    )
    return 2.0 * source.numel() * source.element_size() / min(seconds.values())


def write_results(
    name: str, records: Any, *, options: Mapping[str, Any] | None = None, path: Path | None = None
) -> Path:
    """Write what was measured with date, device and commit to `path`, or to benchmarks/results/gpu-NAME.json."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True, text=True, check=False, cwd=RESULTS.parent,
    )  # fmt: skip
    record = {
        "benchmark": f"gpu/{name}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "commit": git.stdout.strip() or "not known",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "options": {key: value for key, value in (options or {}).items() if key != "json"},
        "results": records,
    }
    path = path or RESULTS / f"gpu-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
