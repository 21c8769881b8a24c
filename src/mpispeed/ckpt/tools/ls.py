"""Rows of `ckpt ls`: the checkpoints of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpispeed.ckpt.format import tags
from mpispeed.ckpt.format.errors import TagNotFound


def rows(folder: Path) -> list[dict[str, Any]]:
    """One row per checkpoint, oldest first, unfinished ones last.

    Returns:
        Rows with the keys tag, folder, step, bytes, created, layout, status, is_latest and problem. Step,
        created and layout are None when the checkpoint has no readable manifest.

    Raises:
        TagNotFound: there is no such folder.
    """
    if not folder.is_dir():
        msg = f"{folder} is no folder"
        raise TagNotFound(msg)
    return [_row(entry) for entry in tags.list_tags(folder)]


def _row(entry: tags.TagEntry) -> dict[str, Any]:
    known = entry.manifest
    return {
        "tag": entry.tag,
        "folder": entry.path.name,
        "step": known.global_step if known else None,
        "bytes": entry.size_bytes,
        "created": known.created if known else None,
        "layout": known.layout if known else None,
        "status": entry.status,
        "is_latest": entry.is_latest,
        "problem": entry.problem,
    }
