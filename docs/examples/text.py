"""Bytes to train on that every Python has: the sources of its own standard library."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

# Tests, tables and texts are left out: they are not the code that one wants to see imitated.
LEFT_OUT = {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "idlelib", "lib2to3"}


def standard_library(cap_bytes: int = 12_000_000, held_out: float = 0.05) -> tuple[Tensor, Tensor]:
    """Training and held-out bytes; whole files are held out, the same ones in every process."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if LEFT_OUT.isdisjoint(path.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    count = max(1, round(held_out * len(files)))
    return _join(files[count:], cap_bytes), _join(files[:count], cap_bytes)


def _join(files: list[Path], cap_bytes: int) -> Tensor:
    text = bytearray()
    for path in files:
        if len(text) >= cap_bytes:
            break
        text += path.read_bytes()
    return torch.frombuffer(text[:cap_bytes], dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Cuts a text into windows of `block` bytes; a sample is a window, and the same one byte later.

    Shapes:
        both members of a sample are (block,) integers.
    """

    def __init__(self, text: Tensor, block: int) -> None:
        self.text, self.block = text, block

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.block
        window = self.text[start : start + self.block + 1].long()
        return window[:-1], window[1:]
