"""Finds the files of cuda/ and slurm/: inside an installed package, else in the checkout."""

from __future__ import annotations

from pathlib import Path

from mpispeed.base.errors import NativeMissing


def folder(kind: str) -> Path:
    """The folder that holds the assets of `kind` ("cuda" or "slurm").

    Raises:
        NativeMissing: neither the installed package nor a checkout has the folder.
    """
    package = Path(__file__).resolve().parents[1]
    candidates = (package / f"_{kind}", package.parents[1] / kind)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    tried = " or ".join(str(c) for c in candidates)
    msg = f"the {kind} files of mpispeed are missing; looked in {tried}; install the package again"
    raise NativeMissing(msg)
