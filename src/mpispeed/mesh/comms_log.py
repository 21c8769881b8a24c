"""The comms logger: latency and bandwidth of each verb and message size, from the records of the trace."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from mpispeed.base.registry import suggest
from mpispeed.mesh.collectives.verbs import TABLE

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import CommTrace, Record
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

KEPT_CALLS = 100_000
"""Latencies that are kept of a row; averages are over the last so many calls."""

TRIMMED = 0.1
"""Part of the latencies that is left out of an average at either end."""

VERBS = (
    *(verb.name for verb in TABLE),
    *("isend", "irecv", "barrier", "agree", "share", "gather_objects", "compressed_all_reduce"),
)

# Names of torch.distributed and DeepSpeed for the same verbs.
ALIASES = {
    "all_gather_into_tensor": "all_gather", "all_gather_base": "all_gather", "all_gather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_base": "reduce_scatter",
    "all_to_all_single": "all_to_all", "all_reduce_coalesced": "all_reduce", "inference_all_reduce": "all_reduce",
    "broadcast_object_list": "share", "all_gather_object": "gather_objects", "monitored_barrier": "barrier",
    "allgather_fn": "all_gather", "reduce_scatter_fn": "reduce_scatter",
}  # fmt: skip

_OVER_ALL = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
_MESSAGE_OF_ONE = frozenset({"all_gather"})
_WIDTH = 20


def bandwidths(verb: str, size_bytes: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithmic and bus bandwidth of one call, in Gbit/s.

    Args:
        verb: name of the verb.
        size_bytes: of a rank's input: its shard for all_gather, the full tensor for reduce_scatter.
        seconds: of the call; 0 (a message that was only posted) has no bandwidth.
        ranks: of the group.
    """
    if seconds <= 0:
        return 0.0, 0.0
    rate = 8e-9 * size_bytes / seconds
    share = (ranks - 1) / ranks
    if verb == "all_gather":
        rate *= ranks
    if verb in _OVER_ALL:
        return rate, rate * share
    if verb == "all_reduce":
        return 2 * rate, 2 * rate * share
    return rate, rate


def trimmed_mean(values: Iterable[float], trimmed: float = TRIMMED) -> float:
    """The mean without the smallest and the largest part; 0 if nothing is left."""
    ordered = sorted(values)
    cut = round(trimmed * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept) if kept else 0.0


def format_size(count_bytes: int) -> str:
    """Bytes in the format of DeepSpeed's table: 1.5 MB of 1024 KB each; 0B."""
    if count_bytes == 0:
        return "0B"
    size, units = float(count_bytes), ("B", "KB", "MB", "GB", "TB", "PB")
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    return f"{round(size, 2)} {units[power]}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The section `comms_logger` of a config."""

    enabled: bool = False
    prof_all: bool = True
    prof_ops: frozenset[str] = frozenset()
    verbose: bool = False
    debug: bool = False

    def takes(self, verb: str) -> bool:
        """True if a verb is recorded."""
        return self.prof_all or verb in self.prof_ops


@dataclass(frozen=True, slots=True)
class Wish:
    """Recording that one call asks for: whatever the settings say if it `is_wanted`, and under another name."""

    is_wanted: bool = False
    name: str = ""


NO_WISH = Wish()


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Calls that are comparable: a name, a message size, a group size."""

    name: str
    size_bytes: int
    ranks: int
    verb: str


@dataclass(slots=True)
class Row:
    """Latencies in seconds, the last `KEPT_CALLS` of them."""

    count: int = 0
    total_seconds: float = 0.0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))

    def add(self, seconds: float) -> None:
        """Add the latency of a call."""
        self.count += 1
        self.total_seconds += seconds
        self.latencies.append(seconds)


class CommsLog:
    """Reads the records of a trace while it is attached and enabled."""

    def __init__(self) -> None:
        self.settings = Settings()
        self._rows: dict[Key, Row] = {}
        self._lock = threading.Lock()
        self._here = threading.local()
        self._detach: Callable[[], None] | None = None

    def configure(
        self,
        section: Mapping[str, object] | None = None,
        *,
        enabled: bool | None = None,
        prof_all: bool | None = None,
        prof_ops: Sequence[str] | None = None,
        verbose: bool | None = None,
        debug: bool | None = None,
    ) -> None:
        """Take the settings of a section, then those given by name; others stay."""
        values: dict[str, object] = dict(section or {})
        given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
        values.update({name: value for name, value in given.items() if value is not None})
        ops = values.get("prof_ops")
        if ops is not None:
            values["prof_ops"] = known_verbs([ops] if isinstance(ops, str) else ops)  # type: ignore[arg-type]
        self.settings = replace(self.settings, **values)  # type: ignore[arg-type]

    def profile(self, ops: Sequence[str], *, is_on: bool) -> None:
        """Switch the recording of some verbs on or off."""
        verbs, now = known_verbs(ops), self.settings.prof_ops
        self.settings = replace(self.settings, prof_ops=now | verbs if is_on else now - verbs)

    @property
    def wish(self) -> Wish:
        """What this thread asks for now."""
        found: Wish = getattr(self._here, "wish", NO_WISH)
        return found

    @contextmanager
    def wishing(self, wish: Wish) -> Iterator[None]:
        """Record the calls of this thread as it asks for."""
        before, self._here.wish = self.wish, wish
        try:
            yield
        finally:
            self._here.wish = before

    @property
    def is_attached(self) -> bool:
        """True if it reads a trace."""
        return self._detach is not None

    def attach(self, comm_trace: CommTrace) -> None:
        """Read a trace, if enabled; idempotent."""
        if self.settings.enabled and self._detach is None:
            self._detach = comm_trace.subscribe(self._read, wants_sites=self.settings.debug)

    def detach(self) -> None:
        """Stop reading; records stay."""
        if self._detach is not None:
            self._detach()
            self._detach = None

    def clear(self) -> None:
        """Drop all records."""
        with self._lock:
            self._rows.clear()

    def rows(self) -> dict[Key, Row]:
        """A copy of everything recorded."""
        with self._lock:
            return {
                key: Row(row.count, row.total_seconds, deque(row.latencies)) for key, row in sorted(self._rows.items())
            }

    def _read(self, record: Record) -> None:
        settings, wish = self.settings, self.wish
        verb = record.verb
        if verb in ("send", "recv") and record.seconds == 0:
            verb = f"i{verb}"  # it was posted: no time passed
        if not (settings.enabled and (wish.is_wanted or settings.takes(verb) or wish.name in settings.prof_ops)):
            return
        size = record.message_bytes // record.size if verb in _MESSAGE_OF_ONE else record.message_bytes
        name = wish.name or verb
        if settings.debug and record.site:
            name = f"{name} | [Caller Func: {record.site}]"
        with self._lock:
            self._rows.setdefault(Key(name, size, record.size, verb), Row()).add(record.seconds)
        if settings.verbose:
            algbw, busbw = bandwidths(verb, size, record.seconds, record.size)
            log.info(
                "comm op: %s | time (ms): %.2f | msg size: %s | algbw (Gbps): %.2f | busbw (Gbps): %.2f",
                name, 1000 * record.seconds, format_size(size), algbw, busbw,
            )  # fmt: skip

    # -- tables ------------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """Latency and bandwidth of this rank for each name and message size."""
        head = ("Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)",
                "busbw_avg (Gbps)", "Ranks")  # fmt: skip
        rows = []
        for key, row in self.rows().items():
            rates = [bandwidths(key.verb, key.size_bytes, seconds, key.ranks) for seconds in row.latencies]
            cells = (1000 * row.total_seconds, 1000 * trimmed_mean(row.latencies), *_averages(rates))
            rows.append((key.name, (format_size(key.size_bytes), row.count, *(f"{x:.2f}" for x in cells), key.ranks)))
        return _layout(head, rows)

    def straggler_table(self, comm: Comm) -> str:
        """Time that this rank waited for others: its latencies less the shortest of all ranks, call by call.

        Leaves out verbs over a part of the ranks, and those whose number of calls differs between ranks.

        Collective over: `comm`, all ranks.
        """
        own = self.rows()
        counts = comm.transport.library_gather_objects({key: len(row.latencies) for key, row in own.items()})
        common = [key for key in own if key.ranks == comm.size and len({c.get(key) for c in counts}) == 1]
        everywhere = comm.transport.library_share(common, 0)  # in one order, and only what rank 0 has too
        head = ("Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)",
                "Avg straggler(ms)", "Latest rank")  # fmt: skip
        rows = []
        for key in everywhere:
            latencies = torch.tensor(own[key].latencies, dtype=torch.float64)
            least = latencies.clone()
            comm.transport.library_all_reduce(least, "min")
            waits = latencies - least
            waited = comm.transport.library_gather_objects(float(waits.sum()))
            latest = min(range(comm.size), key=lambda rank: waited[rank])
            cells = (least.sum(), waits.sum(), trimmed_mean(least.tolist()), trimmed_mean(waits.tolist()))
            texts = (f"{1000 * float(x):.2f}" for x in cells)
            rows.append((key.name, (format_size(key.size_bytes), len(latencies), *texts, latest)))
        return _layout(head, rows)


def known_verbs(names: Sequence[str]) -> frozenset[str]:
    """Verbs by our names; warns of unknown names and keeps them, because they may be recorded one day."""
    found = {ALIASES.get(name, name) for name in names}
    for name in sorted(found - set(VERBS)):
        close = suggest(name, [*VERBS, *ALIASES])
        hint = f'did you mean "{close[0]}"?' if close else f"verbs are {', '.join(VERBS)}"
        log.warning('comms_logger: prof_ops names "%s", and no verb is called so; %s', name, hint)
    return frozenset(found)


def of_process() -> CommsLog:
    """The comms logger of this process."""
    return _PROCESS


_PROCESS = CommsLog()


def _averages(rates: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return trimmed_mean(algbw for algbw, _ in rates), trimmed_mean(busbw for _, busbw in rates)


def _layout(head: Sequence[str], rows: Sequence[tuple[str, tuple[object, ...]]]) -> str:
    """Columns of one width; a name stands on a line of its own, above its rows."""
    lines, last = ["".join(f"{cell:<{_WIDTH}}" for cell in head)], None
    for name, cells in rows:
        if name != last:
            lines.append(name)
            last = name
        lines.append(" " * _WIDTH + "".join(f"{cell!s:<{_WIDTH}}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)
