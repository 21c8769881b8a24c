"""Compares what checkpoints hold."""

from __future__ import annotations

from pathlib import Path

from mpispeed.ckpt.read.reader import open_reader


def difference(first: str | Path, second: str | Path) -> str:
    """The first tensor of two checkpoints that is not the same bit for bit, "names", or ""."""
    with open_reader(first) as ours, open_reader(second) as theirs:
        if ours.index.tensors.keys() != theirs.index.tensors.keys():
            return "names"
        for name, slot in ours.index.tensors:
            if ours.read_array(name, slot).tobytes() != theirs.read_array(name, slot).tobytes():
                return f"{name}/{slot}"
    return ""
