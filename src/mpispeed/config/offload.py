"""Offload of parameters and optimizer states to host memory or files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Fraction, Natural, Positive, Section

Tier = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """Parameters outside the device (stage 3). Replicated units stay on the device."""

    device: Tier = Field("none", description="none, cpu (host memory) or nvme (files).")
    nvme_path: str | None = Field(None, description="Folder on the local disk of each node for device nvme.")
    buffer_count: Natural = Field(5, description="Device nvme: buffers between disk and memory.")
    buffer_size: Natural = Field(
        10**8,
        description="Device nvme: elements of one such buffer, at least those of the longest part of a unit that a "
        "rank holds; where all parts are shorter, so are the buffers.",
    )
    max_in_cpu: Natural = Field(
        10**9, description="Device nvme: elements of each rank, in the order of units, that stay in host memory."
    )
    pin_memory: bool = Field(
        False,
        description="Memory of parameters on the host, and of their buffers with device nvme, is page-locked for "
        "transfers to a GPU. No effect without a GPU.",
    )


class OffloadOptimizer(Section):
    """Masters, optimizer states, and gradients that stay sharded, outside the device (stages 1 to 3)."""

    device: Tier = Field("none", description="none, cpu (host memory) or nvme (files).")
    nvme_path: str | None = Field(None, description="Folder on the local disk of each node for device nvme.")
    buffer_count: Natural = Field(
        4,
        description="Device nvme: buffers between disk and update. One has sub_group_size fp32 elements, or those of "
        "the longest part of a unit where that is shorter.",
    )
    pin_memory: bool = Field(
        False,
        description="Memory of masters, states and gradients on the host, and of their buffers with device nvme, is "
        "page-locked for transfers to a GPU. No effect without a GPU.",
    )
    pipeline_read: bool = Field(False, description="Read the next part while the current one is updated.")
    pipeline_write: bool = Field(False, description="Write the last part while the current one is updated.")
    fast_init: bool = Field(
        False,
        description="Reserve no space for swap files, those of offload_param included, and write nothing before the "
        "first update; a full disk is then found in the middle of the run.",
    )
    ratio: Fraction = Field(
        1.0, description="Part of the states, in the order of units, that is outside the device; below 1 needs stage 3."
    )


class Aio(Section):
    """Asynchronous reads and writes of the nvme tier."""

    block_size: Positive = Field(1 << 20, description="Bytes of one request.")
    queue_depth: Positive = Field(8, description="Requests in flight for each thread.")
    intra_op_parallelism: Positive = Field(1, description="Threads per transfer; also read as thread_count.")
    single_submit: bool = Field(False, description="Submit requests one by one.")
    overlap_events: bool = Field(True, description="Submit while waiting for completions.")
    use_gds: bool = Field(False, description="No effect: files are read into host memory.")
    backend: Literal["auto", "queue", "uring", "threads"] = Field(
        "auto",
        description="How requests reach the kernel: its queue for asynchronous I/O, io_uring, or a pool of threads; "
        "auto takes what this machine allows (mpispeed only).",
    )
