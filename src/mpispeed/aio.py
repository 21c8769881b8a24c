"""Asynchronous I/O of tensors: DeepSpeed's handle, and the block files below it."""

from mpispeed.compat.aio import aio_handle, aio_read, aio_write, memcpy
from mpispeed.native.block_io import BlockFile, BlockIO, Options, Transfer, aligned

__all__ = [
    "BlockFile",
    "BlockIO",
    "Options",
    "Transfer",
    "aio_handle",
    "aio_read",
    "aio_write",
    "aligned",
    "memcpy",
]
