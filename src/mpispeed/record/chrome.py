"""Spans as a trace in Chrome's format, which Perfetto and chrome://tracing show.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_MICRO = 1e6


def chrome_events(spans: np.ndarray, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Events of a trace: each rank is a process, each of its lanes a thread. Times begin with the first span.

    Args:
        spans: of dtype `layout.SPAN`, in any order.
        names: texts of lanes and spans, by number.
    """
    for rank in np.unique(spans["rank"]).tolist():
        yield _told("process_name", rank, 0, name=f"rank {rank}")
        yield _told("process_sort_index", rank, 0, sort_index=rank)
        lanes = spans["lane"][spans["rank"] == rank]
        for lane in np.unique(lanes).tolist():
            yield _told("thread_name", rank, lane, name=names[lane])
            yield _told("thread_sort_index", rank, lane, sort_index=lane)
    if not len(spans):
        return
    first = float(spans["begin"].min())
    # The longer first of those that begin together: what is inside of another comes after it.
    for span in spans[np.lexsort((-spans["end"], spans["begin"]))]:
        rank, lane, name, step, begin, end, size = span.tolist()
        event: dict[str, Any] = {
            "name": names[name], "ph": "X", "pid": rank, "tid": lane, "ts": round(_MICRO * (begin - first), 3),
            "args": {"step": step},
        }  # fmt: skip
        if size:
            event["args"]["bytes"] = size
        if end > begin:
            event["dur"] = round(_MICRO * (end - begin), 3)
        else:
            event |= {"ph": "i", "s": "t"}  # a moment: a message that was posted
        yield event


def write_chrome(path: Path, spans: np.ndarray, names: Sequence[str]) -> int:
    """Write a trace; readers see all of it or nothing. Returns the number of spans.

    Raises:
        OSError: the file cannot be written.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with work.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for number, event in enumerate(chrome_events(spans, names)):
                file.write(f"{',' if number else ''}\n{json.dumps(event)}")
            file.write("\n]}\n")
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
    return len(spans)


def _told(what: str, rank: int, lane: int, **values: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": values}
