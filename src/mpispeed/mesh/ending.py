"""The ways of a transport to end a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

_BEFORE_ABORT: list[Callable[[], object]] = []


def _nothing() -> None:
    """Do nothing: one process has nobody to abort."""


@dataclass(frozen=True, slots=True)
class Ending:
    """`abort(code)` ends all ranks at once; `forgive()` takes back an abort planned for the end of the process."""

    abort: Callable[[int], object] = os._exit
    forgive: Callable[[], object] = _nothing


def before_abort(fn: Callable[[], object]) -> None:
    """Call `fn` when this process ends the job with an error: what waits for peers has to be let go first."""
    if fn not in _BEFORE_ABORT:
        _BEFORE_ABORT.append(fn)


def prepare_abort() -> None:
    """Call what was given to `before_abort`."""
    for fn in _BEFORE_ABORT:
        fn()
