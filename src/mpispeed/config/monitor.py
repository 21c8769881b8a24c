"""Where the course of a run is written."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpispeed.config.section import Positive, Section


class Tensorboard(Section):
    """TensorBoard event files."""

    enabled: bool = Field(False, description="Write TensorBoard event files.")
    output_path: str = Field("", description="Folder; empty is the default folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of the run.")


class CsvMonitor(Section):
    """One CSV file per series."""

    enabled: bool = Field(False, description="Write CSV files.")
    output_path: str = Field("", description="Folder; empty is the default folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of the run.")


class Wandb(Section):
    """Weights & Biases."""

    enabled: bool = Field(False, description="Send to Weights & Biases.")
    group: str | None = Field(None, description="Name of the group of runs.")
    team: str | None = Field(None, description="Name of the team.")
    project: str = Field("deepspeed", description="Name of the project.")


class Comet(Section):
    """Comet."""

    enabled: bool = Field(False, description="Send to Comet.")
    samples_log_interval: Positive = Field(100, description="Samples between two records.")
    project: str | None = Field(None, description="Name of the project.")
    workspace: str | None = Field(None, description="Name of the workspace.")
    api_key: str | None = Field(None, description="Key of the account.")
    experiment_name: str | None = Field(None, description="Name of the experiment.")
    experiment_key: str | None = Field(None, description="Key of the experiment.")
    online: bool | None = Field(None, description="Send now, or keep for later.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(None, description="Continue or create.")
