"""The watchdog's report beside a record: shown with the job that it is of, and with no other."""

import json
import time

import pytest

from mpispeed.record.job_report import report_of
from mpispeed.record.reader import open_record
from mpispeed.record.runs import open_run
from mpispeed.record.summary import STOPPED, summary
from mpispeed.watchdog.report import Report, write
from tests.unit.record.records import note_lines, put, rows, run_id

TEXT = "mpispeed: the job hangs and is ended: ranks 0-2 wait for ever\n  rank 0: all_reduce"


def test_a_job_that_the_watchdog_ended_says_why(tmp_path):
    now = time.time()
    put(tmp_path / "run.h5", rows(range(1, 4), started=now - 50), started=now - 50, is_ended=False)
    write(tmp_path, "report", Report("hang", TEXT), {}, {})
    found = summary(open_run([tmp_path]), now)
    assert found["state"] == STOPPED and found["jobs"][0]["state"] == STOPPED
    assert found["said"].endswith("the job hangs and is ended: ranks 0-2 wait for ever")
    assert found["notes"][-1]["kind"] == "fault" and found["notes"][-1]["text"] == TEXT


def test_a_report_belongs_to_the_job_that_ran_when_it_was_written(tmp_path):
    follows = note_lines({"time": 200.0, "kind": "follows", "run": run_id("run.h5")})
    put(tmp_path / "run.h5", rows(range(1, 4)), started=100.0, is_ended=False)
    put(tmp_path / "run-2.h5", rows(range(3, 6)), started=200.0, is_ended=False, notes=follows)
    records = open_run([tmp_path]).records
    for when, expected in ((50, [False, False]), (150, [True, False]), (250, [False, True])):
        (tmp_path / "report.json").write_text(json.dumps({"time": when, "text": TEXT}))
        assert [report_of(record, records) is not None for record in records] == expected
        notes = summary(open_run([tmp_path]), 300.0)["notes"]
        assert sum(note["kind"] == "fault" for note in notes) == sum(expected)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"[" * 100000, b"\xff", b'{"time": "x", "text": "a"}', b'{"time": 1e9}',
        b'{"time": NaN, "text": ""}', b'{"time": 2e9, "text": 5}',
    ],
)  # fmt: skip
def test_what_is_no_report_is_passed_over(tmp_path, content):
    put(tmp_path / "run.h5", rows(range(1, 4)), is_ended=False)
    (tmp_path / "report.json").write_bytes(content)
    assert report_of(open_record(tmp_path / "run.h5")) is None


def test_a_link_is_not_followed_and_an_ended_job_needs_no_report(tmp_path):
    put(tmp_path / "run.h5", rows(range(1, 4)))
    (tmp_path / "real.json").write_text(json.dumps({"time": 2e9, "text": TEXT}))
    (tmp_path / "report.json").symlink_to("real.json")
    assert report_of(open_record(tmp_path / "run.h5")) is None
    (tmp_path / "report.json").unlink()
    (tmp_path / "real.json").rename(tmp_path / "report.json")
    assert not any(note["kind"] == "fault" for note in summary(open_run([tmp_path]), 2e9)["notes"])
