"""Spans as a trace that browsers show."""

import json

import numpy as np
import pytest

from mpispeed.record.chrome import chrome_events, write_chrome
from mpispeed.record.layout import SPAN

NAMES = ["main", "grads", "step", "forward", "all_reduce data", 'a "quoted" name, é']


def spans(*rows):
    return np.array(list(rows), SPAN)


def test_ranks_are_processes_and_lanes_threads():
    found = spans(
        (1, 0, 3, 7, 1e9 + 0.5, 1e9 + 0.75, 0),
        (0, 0, 2, 7, 1e9 + 0.25, 1e9 + 1.25, 0),
        (0, 1, 4, 7, 1e9 + 0.5, 1e9 + 0.625, 4096),
    )
    events = list(chrome_events(found, NAMES))
    told = [(event["name"], event["pid"], event["tid"], event["args"]) for event in events if event["ph"] == "M"]
    assert ("process_name", 1, 0, {"name": "rank 1"}) in told
    assert ("thread_name", 0, 1, {"name": "grads"}) in told
    assert ("thread_name", 1, 1, {"name": "grads"}) not in told
    assert [event for event in events if event["ph"] != "M"] == [
        {"name": "step", "ph": "X", "pid": 0, "tid": 0, "ts": 0.0, "dur": 1e6, "args": {"step": 7}},
        {"name": "forward", "ph": "X", "pid": 1, "tid": 0, "ts": 250000.0, "dur": 250000.0, "args": {"step": 7}},
        {"name": "all_reduce data", "ph": "X", "pid": 0, "tid": 1, "ts": 250000.0, "dur": 125000.0,
         "args": {"step": 7, "bytes": 4096}},
    ]  # fmt: skip


def test_the_longer_of_two_that_begin_together_is_around_the_other():
    found = spans((0, 0, 3, 1, 5.0, 5.5, 0), (0, 0, 2, 1, 5.0, 6.0, 0))
    assert [event["name"] for event in chrome_events(found, NAMES) if event["ph"] == "X"] == ["step", "forward"]


def test_a_posted_message_is_a_moment():
    [event] = [event for event in chrome_events(spans((0, 0, 4, 1, 5.0, 5.0, 8)), NAMES) if event["ph"] != "M"]
    assert (event["ph"], event["s"], event["args"]["bytes"]) == ("i", "t", 8)
    assert "dur" not in event


@pytest.mark.parametrize("rows", [[], [(0, 0, 5, 1, 1.0, 2.0, 3)]])
def test_the_file_is_json(tmp_path, rows):
    path = tmp_path / "trace.json"
    assert write_chrome(path, spans(*rows), NAMES) == len(rows)
    shown = [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] != "M"]
    assert shown == [NAMES[row[2]] for row in rows]
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    with pytest.raises(IndexError):
        write_chrome(path, spans((0, 0, 99, 1, 1.0, 2.0, 3)), NAMES)
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
