"""Limits of the watcher that names hangs."""

from __future__ import annotations

from pydantic import Field

from mpispeed.config.section import PositiveReal, Section


class Guard(Section):
    """When the watcher speaks up and ends a job that hangs. Variables of the environment go before these."""

    divergence_timeout: PositiveReal = Field(
        30.0,
        description="Seconds by which a hang is named and ended in which no rank can go on (MPISPEED_WATCH_SECONDS).",
    )
    hang_timeout: PositiveReal = Field(
        600.0,
        description="Seconds after which the job is ended because others wait for a rank that is in no operation "
        "(MPISPEED_HANG_TIMEOUT).",
    )
