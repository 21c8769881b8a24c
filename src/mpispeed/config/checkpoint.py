"""Checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Bytes, Natural, Positive, Section, subsection


class ParallelWrite(Section):
    """Ranks that write checkpoints."""

    pipeline_stage: bool = Field(False, description="All stages of a pipeline write at the same time.")


class Checkpoint(Section):
    """Settings of saved checkpoints."""

    tag_validation: Literal["Ignore", "Warn", "Fail"] = Field(
        "Warn", description="What happens when ranks save under different tags; any case."
    )
    load_universal: bool = Field(False, description="Accepted; every checkpoint loads at any number of ranks.")
    use_node_local_storage: bool = Field(
        False,
        description="Every node keeps a whole checkpoint of its own in its folder, and gets one where it lacks it.",
    )
    parallel_write: ParallelWrite = subsection(ParallelWrite, "Who writes.")
    async_save: bool = Field(
        False, description="Copy the state to host memory and go on; a thread writes the copy. Needs THREAD_MULTIPLE."
    )
    overwrite: bool = Field(
        True, description="A save replaces a tag that exists, at once when it is complete; false refuses."
    )
    writing: Literal["auto", "direct", "aggregated"] = Field(
        "auto", description="Every rank writes its part, or one rank per file; auto asks the file system."
    )
    files: Natural = Field(0, description="Files with tensors; 0: one, or one per node where writing is aggregated.")
    window_bytes: Bytes = Field(256 << 20, description="Memory of a rank for aggregated writing.")
    read_back: Literal["none", "sample", "full"] = Field(
        "sample", description="What of a save is read back before it counts; sample is 1 %."
    )
    load_verify: Literal["off", "touched", "full"] = Field(
        "touched", description="What a load compares with checksums: nothing, the blocks it reads, or all there is."
    )
    keep_last: Natural = Field(0, description="After a save so many of the newest checkpoints stay; 0 keeps all.")
    keep_every: Natural = Field(0, description="Checkpoints of steps that are a multiple stay in any case; 0: none.")


class Nebula(Section):
    """A vendor's storage service; accepted, without effect."""

    enabled: bool = Field(False, description="No effect.")
    enable_nebula_load: bool = Field(True, description="No effect.")
    nebula_load_path: str | None = Field(None, description="No effect.")
    load_path: str | None = Field(None, description="No effect.")
    persistent_storage_path: str | None = Field(None, description="No effect.")
    persistent_time_interval: Positive = Field(100, description="No effect.")
    num_of_version_in_retention: Positive = Field(2, description="No effect.")
