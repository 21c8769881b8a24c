"""Default limits of the watchdog, one for the config and for jobs without an engine."""

WATCH_SECONDS = 30.0
"""Seconds until a proven hang is named."""

HANG_SECONDS = 600.0
"""Seconds after which a rank that is in no operation while others wait for it ends the job."""
