"""The one record of communication: counts, bytes and local seconds per verb and axes; never synchronises."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mpispeed.base.units import format_bytes

Axes = tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """What one verb over one set of axes did on this rank.

    Units: `bytes` sent to others by the ring formula; `seconds` spent inside the verb, waiting included.
    """

    count: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Journal:
    """Counts verbs; entries also go to `parent`, so that one journal can see all of a process."""

    def __init__(self, parent: Journal | None = None) -> None:
        self._parent = parent
        self._entries: dict[tuple[str, Axes], Entry] = {}
        self._lock = threading.Lock()

    def enter(self, verb: str, axes: Axes, sent_bytes: int, seconds: float) -> None:
        """Add one call of `verb`."""
        with self._lock:
            entry = self._entries.setdefault((verb, axes), Entry())
            entry.count += 1
            entry.bytes += sent_bytes
            entry.seconds += seconds
        if self._parent is not None:
            self._parent.enter(verb, axes, sent_bytes, seconds)

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
