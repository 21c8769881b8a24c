"""Names of files on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Raises:
        OSError: the folder cannot be opened, or the system cannot write it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
