"""Traces: what all ranks do when, in a few steps."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Positive, Section


class Trace(Section):
    """Times of passes, updates, communication and swap files of all ranks, in some steps."""

    enabled: bool = Field(False, description="Trace some steps on all ranks.")
    start_step: Positive = Field(3, description="First traced step, counted from 1 since the engine was made.")
    end_step: Positive = Field(5, description="Last traced step; then the spans of all ranks go to rank 0.")
    max_spans: Positive = Field(100_000, description="Most spans kept by each rank, of about 50 bytes on rank 0.")
    path: str | None = Field(
        None, description="File for the trace in Chrome's format; null leaves it to the run record."
    )
