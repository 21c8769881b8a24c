"""Host memory that cannot be pinned."""

import logging

import pytest
import torch

from mpispeed.base import log
from mpispeed.native.page_memory import aligned


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can pin here")
def test_memory_that_cannot_be_pinned_is_had_unpinned(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(log, "_seen", set())
    with caplog.at_level(logging.WARNING, logger="mpispeed"):
        buffers = [aligned(nbytes, pin=True) for nbytes in (5000, 6000)]
    assert [buffer.numel() for buffer in buffers] == [5000, 6000]
    assert all(buffer.data_ptr() % 4096 == 0 and not buffer.any() for buffer in buffers)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "host memory is not pinned, copies to a GPU are slower"
    ]
