"""Observation of a run: destinations of metrics, timers, counts, and limits of the watchdog for hangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr

from mpispeed.base.hang_limits import HANG_SECONDS, WATCH_SECONDS
from mpispeed.config.section import Integer, NonNegative, Positive, PositiveReal, Secret, Section, either, subsection


class Tensorboard(Section):
    """TensorBoard event files."""

    enabled: bool = Field(False, description="Write TensorBoard event files.")
    output_path: str | None = Field(None, description="Folder; null or empty is the working folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of the run.")


class CsvMonitor(Section):
    """One CSV file per series."""

    enabled: bool = Field(False, description="Write CSV files.")
    output_path: str | None = Field(None, description="Folder; null or empty is the working folder.")
    job_name: str = Field("DeepSpeedJobName", description="Sub-folder of the run.")


class Wandb(Section):
    """Weights & Biases."""

    enabled: bool = Field(False, description="Send to Weights & Biases.")
    group: str | None = Field(None, description="Name of the group of runs.")
    team: str | None = Field(None, description="Name of the team; null is the account's own.")
    project: str = Field("deepspeed", description="Name of the project.")


class Comet(Section):
    """Comet."""

    enabled: bool = Field(False, description="Send to Comet.")
    samples_log_interval: Positive = Field(100, description="Least number of samples between two points of a series.")
    project: str | None = Field(None, description="Name of the project.")
    workspace: str | None = Field(None, description="Name of the workspace.")
    api_key: Secret | None = Field(None, description="Key of the account; shown and stored as (set).")
    experiment_name: str | None = Field(None, description="Name of the experiment.")
    experiment_key: str | None = Field(None, description="Key of the experiment.")
    online: bool | None = Field(True, description="Send now; false keeps an archive for `comet upload`.")
    mode: Literal["get", "create", "get_or_create"] | None = Field(
        "get_or_create", description="get continues experiment_key, create makes an experiment, get_or_create either."
    )


@dataclass(frozen=True)
class MonitorConfig:
    """The sections of all monitors, as `engine.monitor_config`.

    Attributes:
        tensorboard: of TensorBoard.
        csv_monitor: of CSV files.
        wandb: of Weights & Biases.
        comet: of Comet.
    """

    tensorboard: Tensorboard
    csv_monitor: CsvMonitor
    wandb: Wandb
    comet: Comet

    @classmethod
    def of(cls, config: Any) -> MonitorConfig:
        """The sections of a whole config."""
        return cls(config.tensorboard, config.csv_monitor, config.wandb, config.comet)

    @property
    def enabled(self) -> bool:
        """True if any is on."""
        return any((self.tensorboard.enabled, self.csv_monitor.enabled, self.wandb.enabled, self.comet.enabled))

    def sections(self) -> dict[str, dict[str, Any]]:
        """The sections for `monitor.build`, as `reveal` gives them."""
        return {name: reveal(section) for name, section in vars(self).items()}


def reveal(section: Section) -> dict[str, Any]:
    """A section as plain values, with its keys themselves: for who sends them, not to be shown or stored."""
    secrets = {name: value for name, value in section if isinstance(value, SecretStr)}
    return section.model_dump() | {name: value.get_secret_value() for name, value in secrets.items()}


class CommsLogger(Section):
    """Records of communication."""

    enabled: bool = Field(False, description="Record latency and bandwidth of verbs; a table when the run ends.")
    prof_all: bool = Field(True, description="Record all verbs; otherwise those of prof_ops.")
    prof_ops: list[str] = Field(default_factory=list, description="Names of recorded verbs, such as all_reduce.")
    verbose: bool = Field(False, description="Log each call at once, on rank 0.")
    debug: bool = Field(False, description="Tell calls from different places in the script apart.")


class Throughput(Section):
    """Samples per second."""

    enabled: bool = Field(True, description="Measure the throughput, and report it every steps_per_print steps.")
    synchronized: bool = Field(True, description="Wait for the device before the throughput is reported.")


class Timers(Section):
    """Timers."""

    throughput: Throughput = subsection(Throughput, "Samples per second.")


class FlopsProfiler(Section):
    """Counts of floating-point operations per module."""

    enabled: bool = Field(False, description="Count during one step.")
    recompute_fwd_factor: NonNegative = Field(
        0.0, description="Forward passes repeated in backward, for printed rates; 1 for full recomputation."
    )
    profile_step: Positive = Field(1, description="Steps before the one that is counted.")
    module_depth: Integer = Field(-1, description="Depth of the printed tree; -1 is the innermost.")
    top_modules: Positive = Field(1, description="Modules printed per depth.")
    detailed: bool = Field(True, description="Print every module.")
    output_file: str | None = Field(None, description="File; null is the screen.")
    peak_flops: Annotated[PositiveReal | Literal["measure"], either('"measure" or a number above 0')] | None = Field(
        None,
        description="Operations per second that one rank could do, for its utilisation; measure: those of a product of "
        "matrices, timed on all ranks at once.",
    )


class Guard(Section):
    """Limits after which the watchdog reports a hang and ends the job. Environment variables take precedence."""

    divergence_timeout: PositiveReal = Field(
        WATCH_SECONDS,
        description="Seconds by which a hang is named and ended in which no rank can go on (MPISPEED_WATCH_SECONDS).",
    )
    hang_timeout: PositiveReal = Field(
        HANG_SECONDS,
        description="Seconds after which the job is ended because others wait for a rank that is in no operation "
        "(MPISPEED_HANG_TIMEOUT).",
    )
