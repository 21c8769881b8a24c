"""The trace of communication, read by traffic sums, the comms logger and the watchdog's recorder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from mpispeed.base.units import format_bytes

Axes = tuple[str, ...]


@dataclass(slots=True)
class Record:
    """One ended call of a verb on this rank.

    Units: `message_bytes` of the tensor that counts for the verb's size (the whole one of all_gather and
    reduce_scatter); `sent_bytes` to others by the ring formula; `seconds` inside the verb, waiting included; 0 for
    messages that were only posted. `size` is the number of ranks of the group, `site` the caller: "file:line in
    function", empty unless a reader asked for it or the recorder is open.
    """

    verb: str
    axes: Axes
    size: int
    message_bytes: int
    sent_bytes: int
    seconds: float
    site: str = ""


Reader = Callable[[Record], None]


@dataclass(slots=True)
class Entry:
    """Totals of one verb over one set of axes on this rank.

    Units: `bytes` sent to others by the ring formula; `seconds` spent inside the verb, waiting included.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CommTrace:
    """Counts verbs; records also go to `parent`, so that one trace can see all of a process."""

    def __init__(self, parent: CommTrace | None = None) -> None:
        self._parent = parent
        self._entries: dict[tuple[str, Axes], Entry] = {}
        self._lock = threading.Lock()
        self._readers: tuple[Reader, ...] = ()
        self._wants_sites = False

    @property
    def wants_sites(self) -> bool:
        """True if a reader of this trace or of its parents asked for call sites."""
        return self._wants_sites or (self._parent is not None and self._parent.wants_sites)

    def enter(self, record: Record) -> None:
        """Add one call of a verb."""
        with self._lock:
            entry = self._entries.setdefault((record.verb, record.axes), Entry())
            entry.count += 1
            entry.bytes += record.sent_bytes
            entry.seconds += record.seconds
        for reader in self._readers:
            reader(record)
        if self._parent is not None:
            self._parent.enter(record)

    def subscribe(self, reader: Reader, *, wants_sites: bool = False) -> Callable[[], None]:
        """Call `reader` with every record from now on, on the thread that makes it; returns what ends that."""
        with self._lock:
            self._readers = (*self._readers, reader)
            self._wants_sites |= wants_sites

        def end() -> None:
            with self._lock:
                self._readers = tuple(other for other in self._readers if other is not reader)

        return end

    def entries(self) -> dict[tuple[str, Axes], Entry]:
        """A copy of all entries."""
        with self._lock:
            return {key: Entry(e.count, e.bytes, e.seconds) for key, e in self._entries.items()}

    def reset(self) -> None:
        """Forget everything counted here; the parent keeps its own."""
        with self._lock:
            self._entries.clear()

    def total_bytes(self, verb: str | None = None) -> int:
        """Bytes sent by one verb, or by all."""
        return sum(e.bytes for (name, _), e in self.entries().items() if verb in (None, name))

    def summary(self) -> str:
        """A table for people, largest traffic first."""
        rows = sorted(self.entries().items(), key=lambda item: -item[1].bytes)
        lines = [f"{'verb':<16}{'axes':<20}{'calls':>10}{'sent':>14}{'seconds':>12}"]
        for (verb, axes), e in rows:
            lines.append(
                f"{verb:<16}{','.join(axes) or '-':<20}{e.count:>10}{format_bytes(e.bytes):>14}{e.seconds:>12.3f}"
            )
        return "\n".join(lines)
