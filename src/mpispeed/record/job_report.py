"""The watchdog's report of a job, which lies beside its record where both are in the folder of the run.

A job that hangs, or loses a rank, is ended from outside: its record cannot say why. The report of the last such job of
the folder is in report.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpispeed.base.plain import read_plain

if TYPE_CHECKING:
    from mpispeed.record.reader import Record

FILE = "report.json"
_MOST_BYTES = 4 << 20
_MOST_TEXT = 4000


def report_of(record: Record, later: Sequence[Record] = ()) -> dict[str, Any] | None:
    """The report as a note of kind "fault", if it is of the job of this record.

    It is if it was written after that job had started, and before any of `later` had. Whatever else lies there is
    passed over, as by a run that has no watchdog.
    """
    try:
        found = json.loads(read_plain(record.path.parent / FILE, _MOST_BYTES))
        when, text = float(found["time"]), found["text"]
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    ends = min((other.started for other in later if other.started > record.started), default=math.inf)
    if not isinstance(text, str) or not record.started <= when < ends:
        return None
    return {"time": when, "kind": "fault", "text": text[:_MOST_TEXT], "file": FILE}
