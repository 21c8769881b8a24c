"""Where parameters and optimizer states rest: device, host memory or files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Fraction, Natural, Positive, Section

Tier = Literal["none", "cpu", "nvme"]


class OffloadParam(Section):
    """Parameters outside the device (stage 3)."""

    device: Tier = Field("none", description="none, cpu (host memory) or nvme (files).")
    nvme_path: str | None = Field(None, description="Folder on the local disk for device nvme.")
    buffer_count: Natural = Field(5, description="Number of buffers between disk and memory.")
    buffer_size: Natural = Field(10**8, description="Elements of one such buffer.")
    max_in_cpu: Natural = Field(10**9, description="Parameter elements kept in host memory for device nvme.")
    pin_memory: bool = Field(False, description="Use page-locked host memory.")


class OffloadOptimizer(Section):
    """Masters and optimizer states outside the device."""

    device: Tier = Field("none", description="none, cpu (host memory) or nvme (files).")
    nvme_path: str | None = Field(None, description="Folder on the local disk for device nvme.")
    buffer_count: Natural = Field(4, description="Number of buffers between disk and memory.")
    pin_memory: bool = Field(False, description="Use page-locked host memory.")
    pipeline_read: bool = Field(False, description="Read the next part while the current one is updated.")
    pipeline_write: bool = Field(False, description="Write the last part while the current one is updated.")
    fast_init: bool = Field(False, description="Skip parts of the first write to disk.")
    ratio: Fraction = Field(1.0, description="Part of the states that is updated on the host; below 1 needs stage 3.")


class Aio(Section):
    """Asynchronous reads and writes of the nvme tier."""

    block_size: Positive = Field(1 << 20, description="Bytes of one request.")
    queue_depth: Positive = Field(8, description="Requests in flight.")
    intra_op_parallelism: Positive = Field(1, description="Threads per request; also read as thread_count.")
    single_submit: bool = Field(False, description="Submit requests one by one.")
    overlap_events: bool = Field(True, description="Submit while waiting for completions.")
    use_gds: bool = Field(False, description="Transfer directly between disk and GPU.")
