"""What a transport does to end a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    """One process has nobody to abort at its end."""


@dataclass(frozen=True, slots=True)
class Ending:
    """`abort(code)` ends all ranks at once; `forgive()` takes back an abort planned for the end of the process."""

    abort: Callable[[int], object] = os._exit
    forgive: Callable[[], object] = _nothing
