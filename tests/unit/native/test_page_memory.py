"""Host memory that cannot be pinned."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import logging
import torch
from mpispeed.native.page_memory import aligned

logging.basicConfig(format="%(levelname)s %(message)s")
torch.cuda.is_available = lambda: True
buffers = [aligned(nbytes, pin=True) for nbytes in (5000, 6000)]
assert [buffer.numel() for buffer in buffers] == [5000, 6000]
assert all(buffer.data_ptr() % 4096 == 0 and not buffer.any() for buffer in buffers)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can pin here")
def test_memory_that_cannot_be_pinned_is_had_unpinned():
    """In a process of its own: where the stand-in for a device is loaded, memory is pinned by it."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.partition(":")[0] for line in done.stderr.splitlines() if "WARNING" in line]
    assert told == ["WARNING host memory is not pinned, copies to a GPU are slower"]
