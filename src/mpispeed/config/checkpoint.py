"""Checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Positive, Section, subsection


class ParallelWrite(Section):
    """Who writes."""

    pipeline_stage: bool = Field(False, description="All stages of a pipeline write at the same time.")


class Checkpoint(Section):
    """How a run is saved."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = Field(
        "Warn", description="What happens when ranks save under different tags; any case."
    )
    load_universal: bool = Field(False, description="Accepted; every checkpoint loads at any number of ranks.")
    use_node_local_storage: bool = Field(False, description="Each node writes to its own disk.")
    parallel_write: ParallelWrite = subsection(ParallelWrite, "Who writes.")


class Nebula(Section):
    """A vendor's storage service; accepted, without effect."""

    enabled: bool = Field(False, description="No effect.")
    enable_nebula_load: bool = Field(True, description="No effect.")
    nebula_load_path: str | None = Field(None, description="No effect.")
    load_path: str | None = Field(None, description="No effect.")
    persistent_storage_path: str | None = Field(None, description="No effect.")
    persistent_time_interval: Positive = Field(100, description="No effect.")
    num_of_version_in_retention: Positive = Field(2, description="No effect.")
