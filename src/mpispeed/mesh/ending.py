"""The ways of a transport to end a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """Do nothing: one process has nobody to abort."""


@dataclass(frozen=True, slots=True)
class Ending:
    """`abort(code)` ends all ranks at once; `forgive()` takes back an abort planned for the end of the process."""

    abort: Callable[[int], object] = os._exit
    forgive: Callable[[], object] = _nothing
