"""The compiled launcher; None where it was not built, and then no kernel is launched and references run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.native import status

if TYPE_CHECKING:
    from mpispeed._native import launch
else:
    launch = status.found("launch")

is_built: bool = launch is not None
