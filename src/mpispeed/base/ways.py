"""The way to a file: every folder and link that the system passes, each of which could lead somebody elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

_MOST_LINKS = 40
"""As many as Linux follows: path_resolution(7)."""


def walk_to(path: Path) -> list[tuple[Path, os.stat_result]]:
    """What the system passes from the root to a file, itself last: (path without links above it, its own status).

    Raises:
        OSError: something on the way is not there, or cannot be looked at; or links lead in a circle.
    """
    place = Path("/")
    passed = [(place, place.lstat())]
    words = [*reversed(path.absolute().parts[1:])]
    links = 0
    while words:
        word = words.pop()
        if word == "..":
            place = place.parent
            continue
        here = place / word
        status = here.lstat()
        passed.append((here, status))
        if not here.is_symlink():
            place = here
            continue
        links += 1
        if links > _MOST_LINKS:
            msg = f"more than {_MOST_LINKS} links lead to it"
            raise OSError(msg)
        target = Path(here.readlink())
        place = Path("/") if target.is_absolute() else place
        words += reversed(target.parts[target.is_absolute() :])
    return passed
