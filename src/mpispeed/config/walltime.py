"""Runs that know when their job ends."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mpispeed.base.units import parse_duration
from mpispeed.config.section import LARGEST, Names, Natural, NonNegative, Real, Section

KNOWN_SIGNALS = ("HUP", "USR1", "USR2", "TERM", "XCPU")


def _check_limit(value: Any) -> Any:
    """Check a duration, kept as given. Runs before the types are tried: one message instead of one for each."""
    if value is None or (_is_number_or_text(value) and _is_duration(value)):
        return value
    raise PydanticCustomError("duration", "Input should be seconds, or a time such as 30:00, 2:00:00 or 1-12:00:00")


def _is_number_or_text(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _is_duration(value: str | float) -> bool:
    try:
        return parse_duration(value) <= LARGEST
    except (ValueError, OverflowError):
        return False


def _check_signals(names: list[str]) -> list[str]:
    """Names without SIG, each once."""
    plain = [name.upper().removeprefix("SIG") for name in names]
    wrong = [name for name in plain if name not in KNOWN_SIGNALS or not hasattr(signal, f"SIG{name}")]
    if wrong:
        known = {"known": ", ".join(KNOWN_SIGNALS)}
        raise PydanticCustomError("signal", "Input should be some of {known}", known)
    return list(dict.fromkeys(plain))


def _check_tag(value: str) -> str:
    """A name that differs between steps."""
    if "{step}" not in value or value.replace("{step}", "").count("{"):
        raise PydanticCustomError("tag", "Input should have {step} in it, and no other braces")
    return value


class Walltime(Section):
    """Saving before the job ends and on request, and continuing in the next job. mpispeed only."""

    enabled: bool = Field(True, description="Needs save_dir.")
    save_dir: str | None = Field(None, description="Folder of the checkpoints; null: none of this happens.")
    limit: Annotated[str | NonNegative | None, BeforeValidator(_check_limit)] = Field(
        None,
        description="Time from the start of the program to the end of the job: seconds or D-HH:MM:SS. "
        "MPISPEED_WALLTIME goes first; SLURM is asked besides, and the earlier end counts.",
    )
    margin_seconds: NonNegative = Field(30.0, description="Time to leave unused at the end of the job.")
    margin_factor: Annotated[Real, Field(ge=1)] = Field(
        1.5, description="A save is expected to take so many times what the slowest of the last ten took."
    )
    signals: Annotated[Names, AfterValidator(_check_signals)] = Field(
        ["USR1", "TERM"], description="Signals that ask a run to save and stop."
    )
    chain: Literal["dependency", "requeue", "none"] = Field(
        "dependency",
        description="What follows an interrupted run: a new job that waits for the end of this one; the same job "
        "again, requeued by its batch script; nothing.",
    )
    max_chain: Natural = Field(100, description="Most jobs that may follow the first one.")
    resume: bool = Field(True, description="initialize loads the latest checkpoint of save_dir, if there is one.")
    tag: Annotated[str, AfterValidator(_check_tag)] = Field(
        "walltime_step{step}", description="Name of a checkpoint that the run makes by itself."
    )
    keep_last: Natural = Field(2, description="So many of these checkpoints stay; 0 keeps all.")
    ends_program: bool = Field(
        True,
        description="After the save engine.step raises RunEnded, an exit; else only engine.must_stop becomes true.",
    )
    exit_code: Annotated[Natural, Field(le=255)] = Field(0, description="Status that the program then ends with.")
