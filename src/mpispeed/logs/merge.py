"""Merged log of all ranks, in the order of time; lines that several ranks have alike appear once."""

from __future__ import annotations

import contextlib
import functools
import heapq
import re
import resource
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

MERGED = "merged.log"

WINDOW_SECONDS = 5.0
"""Ranks that say the same within this time say it together."""

_NAME = re.compile(r"rank-(\d+)\.log$")
_STAMP = len("2026-01-01 00:00:00.000000")
_WHOLE = len("2026-01-01 00:00:00")
_TRACE = "Traceback (most recent call last):"
_LONGEST_QUEUE = 10_000


@dataclass(slots=True)
class Entry:
    """A line, or a whole traceback, of one rank or of several that have it alike."""

    time: str
    stream: str
    lines: list[str]
    ranks: list[int]
    key: tuple[str, ...] = field(default=())

    @property
    def is_note(self) -> bool:
        """True for notes of the relay about the rank."""
        return self.stream == "-"

    def shown(self) -> Iterator[str]:
        """Lines of the merged log."""
        for line in self.lines:
            yield f"{self.time} [{format_ranks(self.ranks)}] {line}"


def find_logs(folder: Path) -> dict[int, Path]:
    """Logs of ranks in a folder, by rank."""
    found = ((_NAME.search(path.name), path) for path in folder.glob("rank-*.log"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def merge_logs(folder: Path, target: Path | None = None) -> int:
    """Write the logs of all ranks in `folder` as one, by default `merged.log` there; return the number of ranks.

    Raises:
        OSError: the folder cannot be read or the file not be written.
    """
    logs = find_logs(folder)
    if not logs:
        return 0
    target = target or folder / MERGED
    part = target.with_name(target.name + ".part")
    try:
        with part.open("w", encoding="utf-8") as file:
            for line in merged_lines(logs):
                file.write(line + "\n")
        part.replace(target)
    except BaseException:  # a full disk, or somebody who does not want to wait: half a file helps nobody
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return len(logs)


def merged_lines(logs: dict[int, Path]) -> Iterator[str]:
    """Lines of all logs in the order of time, each with its ranks."""
    _allow_handles(len(logs))
    streams = [read_entries(path, rank) for rank, path in logs.items()]
    for entry in collapse(heapq.merge(*streams, key=lambda entry: (entry.time, entry.ranks[0]))):
        yield from entry.shown()


def read_entries(path: Path, rank: int) -> Iterator[Entry]:
    """Entries of one log, in the order in which they begin. Lines without a time, left by a full disk, are dropped."""
    queue: deque[Entry] = deque()
    unfinished: dict[str, Entry] = {}  # by stream, because the other one goes on within a traceback
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for raw in file:
            line = raw.rstrip("\n")
            time, stream, text = line[:_STAMP], line[_STAMP + 1 : _STAMP + 2], line[_STAMP + 3 :]
            if stream not in ("o", "e", "-"):
                continue
            trace = unfinished.get(stream)
            if trace is not None:
                trace.lines.append(text)
                if text and not text.startswith((" ", "\t")):
                    del unfinished[stream]  # that was the error itself
            else:
                queue.append(Entry(time, stream, [text], [rank]))
                if text == _TRACE:
                    unfinished[stream] = queue[-1]
            while queue and (queue[0] not in unfinished.values() or len(queue) > _LONGEST_QUEUE):
                yield queue.popleft()
    yield from queue


def collapse(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Join entries that several ranks have alike within a short time at the place of the first."""
    waiting: deque[Entry] = deque()
    known: dict[tuple[str, ...], Entry] = {}
    for entry in entries:
        varying = _varying(entry.ranks[0])
        entry.key = (entry.stream, *(varying.sub("#", line) for line in entry.lines))
        while waiting and _seconds(entry.time) - _seconds(waiting[0].time) > WINDOW_SECONDS:
            yield _release(waiting, known)
        same = known.get(entry.key)
        if same is not None and not entry.is_note and entry.ranks[0] not in same.ranks and entry.lines != [""]:
            same.ranks.append(entry.ranks[0])
            continue
        known[entry.key] = entry
        waiting.append(entry)
    while waiting:
        yield _release(waiting, known)


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks in short form: 0-3,7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _release(waiting: deque[Entry], known: dict[tuple[str, ...], Entry]) -> Entry:
    entry = waiting.popleft()
    if known.get(entry.key) is entry:
        del known[entry.key]
    return entry


@functools.cache
def _varying(rank: int) -> re.Pattern[str]:
    """Pattern of what differs between ranks that say the same: addresses, processes, times, and their own numbers.

    The numbers of others stay: a line "waits for rank 3" differs from "waits for rank 1".
    """
    own = rf"\[{rank}\] |\brank {rank}\b"
    return re.compile(rf"0x[0-9a-fA-F]+|\bpid \d+|^\d\d:\d\d:\d\d(?:[.,]\d+)? |{own}")


def _seconds(time: str) -> float:
    """Seconds since 1970 of a time stamp."""
    try:
        return _whole_seconds(time[:_WHOLE]) + float(time[_WHOLE:] or 0)
    except ValueError:
        return 0.0


@functools.lru_cache(maxsize=64)
def _whole_seconds(time: str) -> float:
    return datetime.fromisoformat(time).replace(tzinfo=timezone.utc).timestamp()


def _allow_handles(count: int) -> None:
    """Raise the limit of open files: all logs are open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 64
    if soft != resource.RLIM_INFINITY and soft < wanted:
        best = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (best, hard))
