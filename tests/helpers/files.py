"""Folders on a disk and in memory, and buffers at every address."""

import contextlib
import tempfile
from pathlib import Path

import torch

from mpispeed.native.page_memory import aligned

# A disk, whose file systems mostly grant O_DIRECT, and memory.
FOLDERS = [folder for folder in ("/var/tmp", "/dev/shm") if Path(folder).is_dir()]


@contextlib.contextmanager
def fresh_folder(parent):
    with tempfile.TemporaryDirectory(prefix="mpispeed-test-", dir=parent) as folder:
        yield Path(folder)


def buffer_at(nbytes, shift=0):
    """Zeroed bytes `shift` after the start of a page."""
    return aligned(nbytes + shift)[shift : shift + nbytes]


def noise(nbytes, seed=0, shift=0):
    return buffer_at(nbytes, shift).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
