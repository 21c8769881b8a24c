"""Timers, counts of communication and of floating-point operations."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import Integer, NonNegative, Positive, Section, subsection


class CommsLogger(Section):
    """Records of communication."""

    enabled: bool = Field(False, description="Record latency and bandwidth of verbs; a table when the run ends.")
    prof_all: bool = Field(True, description="Record all verbs; otherwise those of prof_ops.")
    prof_ops: list[str] = Field(default_factory=list, description="Names of recorded verbs, such as all_reduce.")
    verbose: bool = Field(False, description="Log each call at once, on rank 0.")
    debug: bool = Field(False, description="Tell calls from different places in the script apart.")


class Throughput(Section):
    """Samples per second."""

    enabled: bool = Field(True, description="Measure the throughput.")
    synchronized: bool = Field(True, description="Synchronize the device around the measured part.")


class Timers(Section):
    """Timers."""

    throughput: Throughput = subsection(Throughput, "Samples per second.")


class FlopsProfiler(Section):
    """Counts of floating-point operations per module."""

    enabled: bool = Field(False, description="Count during one step.")
    recompute_fwd_factor: NonNegative = Field(
        0.0, description="Forward passes repeated in backward; 1 for full recomputation."
    )
    profile_step: Positive = Field(1, description="The step that is counted.")
    module_depth: Integer = Field(-1, description="Depth of the printed tree; -1 is the innermost.")
    top_modules: Positive = Field(1, description="Modules printed per depth.")
    detailed: bool = Field(True, description="Print every module.")
    output_file: str | None = Field(None, description="File; null is the screen.")
