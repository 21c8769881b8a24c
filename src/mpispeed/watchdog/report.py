"""Reports of a watchdog: texts for people, and files in the folder of the run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.units import format_list, format_ranks
from mpispeed.watchdog.wait_graph import Doing, Judgement, RankState

if TYPE_CHECKING:  # with it comes numpy, which `mpispeed run` does not need
    from mpispeed.watchdog.recorder_reader import Group, Operation

ADVICE = (
    "All ranks of a group must call the same operations in the same order: look for control flow that depends on the "
    "rank or on its data."
)


LIMIT_NAMES = "guard.hang_timeout in the config, or MPISPEED_HANG_TIMEOUT"


@dataclass(slots=True)
class Report:
    """The reason for ending a job, or a notice. `text` is for people; `facts` for programs."""

    kind: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a dict for files and the side channel."""
        return {"kind": self.kind, "text": self.text, **self.facts}


def of_hang(judgement: Judgement, states: Mapping[int, RankState], seconds: float) -> Report:
    """Report ranks that wait for each other, or for one that is gone."""
    named = set(judgement.stuck)
    for rank in judgement.stuck:
        named.update(other for other in judgement.waits_on[rank] if states[other].gone)
    why = "a rank that others wait for will not come" if judgement.has_gone else "no rank can go on any more"
    wait = f"{format_ranks(judgement.stuck)} {'wait' if len(judgement.stuck) > 1 else 'waits'} for ever"
    head = f"mpispeed: the job hangs and is ended: {wait} ({why}; {seconds:.0f} s)"
    lines = [head, *_rank_lines(states, named, judgement.waits_on), f"  {ADVICE}"]
    return Report("hang", "\n".join(lines), {"ranks": sorted(named), **_facts(states, named)})


def of_late(judgement: Judgement, states: Mapping[int, RankState], *, ends: bool, limit_seconds: float) -> Report:
    """Report ranks that are in no operation while others wait for them."""
    places = [
        f"{format_ranks([rank])}{f' at {states[rank].place}' if states[rank].place else ''}" for rank in judgement.late
    ]
    waited_for = format_list(places, 4)
    seconds = judgement.waiting_seconds
    if ends:
        head = f"mpispeed: the job is ended: others have waited for {waited_for} for {seconds:.0f} s"
        cure = f"  The limit is {limit_seconds:.0f} s ({LIMIT_NAMES}); raise it if a rank may take so long."
    else:
        head = f"mpispeed: notice: waiting for {waited_for} since {seconds:.0f} s"
        cure = f"  The job goes on; it is ended after {limit_seconds:.0f} s ({LIMIT_NAMES})."
    named = [*judgement.waiting[:4], *judgement.late[:4]]
    lines = [head, *_rank_lines(states, named, judgement.waits_on), cure]
    return Report("late", "\n".join(lines), {"ranks": list(judgement.late), **_facts(states, named)})


def of_slow(judgement: Judgement, states: Mapping[int, RankState], *, ends: bool, limit_seconds: float) -> Report:
    """Report ranks in an operation that all its members have reached and that takes very long."""
    what = "the job is ended" if ends else "notice"
    head = (
        f"mpispeed: {what}: all members of an operation are in it since {judgement.slow_seconds:.0f} s and it has not "
        "ended; the network may be slow or broken"
    )
    named = judgement.slow[:8]
    limit = f"  The limit is {limit_seconds:.0f} s ({LIMIT_NAMES})."
    text = "\n".join([head, *_rank_lines(states, named, judgement.waits_on), limit])
    return Report("slow", text, {"ranks": list(named), **_facts(states, named)})


def of_mismatch(text: str, ranks: Sequence[int], groups: str) -> Report:
    """Report ranks that called different operations at the same place in their order."""
    head = f"mpispeed: ranks diverged and the job is ended: {text}"
    return Report("mismatch", f"{head}\n  {ADVICE}", {"ranks": sorted(ranks), "group": groups})


def of_lost_node(hosts: Iterable[str], ranks: Iterable[int], seconds: float, states: Mapping[int, RankState],
                 named: Sequence[int]) -> Report:  # fmt: skip
    """Report nodes that are silent while ranks here wait for theirs."""
    lost = sorted(ranks)
    head = (
        f"mpispeed: the job is ended: no word from node {', '.join(hosts)} ({format_ranks(lost)}) for {seconds:.0f} s, "
        "and ranks here wait for it: the node or the network between the nodes is lost"
    )
    text = "\n".join([head, *_rank_lines(states, named, {})])
    return Report("lost node", text, {"ranks": lost, "hosts": list(hosts), **_facts(states, named)})


def tail(operations: Iterable[Operation], groups: Mapping[int, Group], now: float) -> list[str]:
    """Lines of a rank's last operations, the newest last."""
    lines = []
    for operation in operations:
        group = groups.get(operation.comm)
        state = "under way" if not operation.is_over else "done"
        lines.append(
            f"{now - operation.begin:9.3f} s ago  {state:9}  #{operation.seq} "
            f"{operation.text(group.name if group else '')} at {operation.site or '?'}"
        )
    return lines


def write(
    folder: Path, name: str, report: Report, tails: Mapping[int, Sequence[str]], steps: Mapping[int, int]
) -> Path | None:
    """Write a report as text and as JSON; None if that fails: a full disk must not stop a report.

    `steps` are those that ranks have ended, of ranks that train.
    """
    path = folder / f"{name}.txt"
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), report.text, ""]
    for rank, found in sorted(tails.items()):
        lines += [
            f"last operations of rank {rank}{'' if rank not in steps else f', in step {steps[rank] + 1}'}",
            *(f"  {line}" for line in found),
            "",
        ]
    facts = {**report.to_json(), "time": time.time(), "last_operations": {str(r): list(t) for r, t in tails.items()},
             "steps": {str(r): n for r, n in steps.items()}}  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for target, text in ((path, "\n".join(lines)), (folder / f"{name}.json", json.dumps(facts, indent=1) + "\n")):
            part = target.with_name(target.name + ".part")
            part.write_text(text)
            part.replace(target)
    except OSError:
        return None
    return path


def say(text: str) -> None:
    """Write to stderr in one piece; nobody may be there to read it any more."""
    try:
        os.write(sys.stderr.fileno(), (text + "\n").encode(errors="replace"))
    except (OSError, ValueError):
        return


def leave_mark() -> None:
    """Leave a mark for `mpispeed run` that the end has been explained; only a watchdog on its own host can."""
    path = os.environ.get("MPISPEED_SAID")
    if path:
        with contextlib.suppress(OSError):
            Path(path).touch()


WATCHING = "watching"
"""Beside the mark: a file that each watchdog on the host of `mpispeed run` keeps locked until it ends."""


INTERRUPTED = "interrupted"
"""Beside the mark: made by `mpispeed run` when Ctrl-C came, before it passes it on."""


def hold_mark() -> int | None:
    """Let `mpispeed run` wait for whoever holds the descriptor: nothing is written when the command has returned."""
    path = os.environ.get("MPISPEED_SAID")
    if path:
        with contextlib.suppress(OSError):
            held = os.open(Path(path).with_name(WATCHING), os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(held, fcntl.LOCK_SH)
            return held
    return None


def is_interrupted() -> bool:
    """True if Ctrl-C has ended the job: what dies then needs no explanation, also where the launcher kills it."""
    path = os.environ.get("MPISPEED_SAID")
    return bool(path) and Path(path or "").with_name(INTERRUPTED).exists()


def wait_for_watchers(folder: Path, limit_seconds: float) -> None:
    """Return when no watchdog holds the mark in `folder`, or after the limit."""
    end = time.monotonic() + limit_seconds
    with (folder / WATCHING).open() as file:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.02)


def _last(state: RankState) -> str:
    return f", which was last at {state.last_site}" if state.last_site else ""


def _rank_lines(
    states: Mapping[int, RankState], ranks: Iterable[int], waits_on: Mapping[int, Sequence[int]], most: int = 8
) -> list[str]:
    lines = []
    found = sorted(set(ranks))
    for rank in found[:most]:
        state = states[rank]
        if state.gone:
            lines.append(f"  rank {rank} {state.gone}{_last(state)}")
        elif state.blocking:
            others = waits_on.get(rank, ())
            waits = f"; waits for {format_ranks(others)}" if others else ""
            lines.append(f"  rank {rank} is in {_deepest(state).text} at {_deepest(state).site or '?'}{waits}")
        else:
            where = f" at {state.place}" if state.place else f"; it was last at {state.last_site}"
            lines.append(f"  rank {rank} is in no operation{where if state.place or state.last_site else ''}")
    if len(found) > most:
        lines.append(f"  and {len(found) - most} more ranks")
    return lines


def _deepest(state: RankState) -> Doing:
    """The last operation a rank waits for: the started one it stands at if that is queued."""
    return state.blocking[-1]


def _facts(states: Mapping[int, RankState], ranks: Iterable[int]) -> dict[str, Any]:
    facts = {}
    for rank in sorted(set(ranks)):
        state = states[rank]
        doing = _deepest(state) if state.blocking else None
        facts[str(rank)] = {
            "gone": state.gone,
            "operation": doing.text if doing else "",
            "site": doing.site if doing else state.place or state.last_site,
            "seq": doing.seq if doing else 0,
            "seconds": doing.age_seconds if doing else 0.0,
        }
    return {"states": facts}
