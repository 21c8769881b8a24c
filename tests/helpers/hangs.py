"""What the report of a drill of tests/jobs/hang_worker.py has to name; used by tests and by `make soak`."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

WORKER = Path(__file__).resolve().parents[1] / "jobs" / "hang_worker.py"
WAYS = ("missing", "order", "size", "dtype", "kill", "kill_mapped", "send")
RANKS = 3


def place(way: str, mark: str) -> str:
    """The line of a mark in a way's function, as hang_worker.py:41."""
    inside = ""
    for number, line in enumerate(WORKER.read_text().splitlines(), 1):
        if line.startswith("def "):
            inside = line.removeprefix("def ").partition("(")[0]
        if line.endswith(f"# at {mark}") and inside in (way, "main"):
            return f"{WORKER.name}:{number}"
    message = f"no mark {mark} of {way}"
    raise ValueError(message)


def problems(way: str, code: int, errors: str, folder: Path, watch_seconds: float) -> list[str]:
    """What is wrong about how a drill ended; nothing if its report names the ranks and their places in time."""
    found = [] if code else ["the exit code is 0"]
    path = folder / "report.json"
    if not path.exists():
        return [*found, f"there is no report\n{errors}"]
    report = json.loads(path.read_text())
    text = report["text"]
    wanted = _wanted(way)
    found += [f"the report does not say {part!r}" for part in wanted if part not in text]
    found += [f"stderr does not say {part!r}" for part in wanted if part not in errors]
    # A watchdog that is behind its rank on a busy machine may be missed first, which is told and no second message.
    early = re.findall(r"mpispeed: notice: .*nothing is heard of the watchdog", errors)
    messages = errors.count("mpispeed: ") - len(early)
    if messages != 1 and not (way in ("size", "dtype") and messages == 2):  # there ranks find it themselves too
        found.append(f"{messages} messages instead of one")
    kinds = {"kill": "death: killed", "kill_mapped": "death: killed"} | dict.fromkeys(
        ("size", "dtype", "missing"), "mismatch"
    )
    if report["kind"] != kinds.get(way, "hang"):
        found.append(f"it is a {report['kind']}")
    seconds = seconds_since_begun(folder)
    if seconds > watch_seconds + END_SECONDS:
        found.append(f"it took {seconds:.1f} s")
    return [f"{problem}\n{errors}" for problem in found]


def seconds_since_begun(folder: Path) -> float:
    """Since the worker came to what goes wrong; its start takes any time on a busy machine."""
    return time.time() - (folder / "begun").stat().st_mtime


END_SECONDS = 30.0
"""To find a place, to tell it and to end the job."""


def _wanted(way: str) -> list[str]:
    if way == "missing":  # rank 1 goes on to the barrier, where the others are in their sum
        return [
            f"rank 1 came with barrier at {_at('missing', 'end')}",
            f"came with all_reduce (sum) of 8 float32 at {_at('missing', 'waits')}",
        ]
    if way == "order":
        return [
            f"rank 0 is in all_reduce (sum) of 8 float32 over group at {_at('order', 'first')}",
            f"rank 1 is in barrier over world at {_at('order', 'second')}",
        ]
    if way == "size":
        called = _at("size", "call")
        return [f"of 8 float32, root rank 0, at {called}", f"of 4 float32, root rank 0, at {called}"]
    if way == "dtype":
        called = _at("dtype", "call")
        return [f"rank 1 came with all_reduce (sum) of 8 int32 at {called}", f"of 8 float32 at {called}"]
    if way in ("kill", "kill_mapped"):
        return ["because rank 1 on ", "SIGKILL"]
    return [
        f"rank 0 is in send of 4194304 float32 to rank 1 over world at {_at('send', 'waits')}",
        f"rank 1 is in barrier over world at {_at('send', 'other')}",
    ]


def _at(way: str, mark: str) -> str:
    name, _, line = place(way, mark).partition(":")
    return f"{_folder_shown()}{name}:{line}"


def _folder_shown() -> str:
    """Jobs of tests run in the root of the checkout."""
    return "tests/jobs/"
