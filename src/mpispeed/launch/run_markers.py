"""Marks that a run has left on its end, in the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mpispeed.walltime import run_state

_ON_PURPOSE = (run_state.INTERRUPTED, run_state.STOPPED, run_state.FINISHED)


@dataclass
class Marks:
    """The file `state.json` of a run, seen before and after a start."""

    folder: Path
    _before: tuple[int, int] | None = field(default=None, init=False)

    def remember(self) -> None:
        """Read the file before a start."""
        self._before = self._look()

    def new(self) -> str:
        """The end on purpose that the run has noted since `remember`; else ""."""
        found = run_state.read(self.folder) if self._look() != self._before else None
        return found.state if found is not None and found.state in _ON_PURPOSE else ""

    def _look(self) -> tuple[int, int] | None:
        """Identity of the file; it changes when the file is replaced, whatever clocks of other machines show."""
        try:
            found = (self.folder / run_state.NAME).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
