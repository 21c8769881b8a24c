"""The writer of a run record: what is handed over comes to the file, and no caller waits for a file system."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpispeed.record import layout, record_file, writer
from mpispeed.record.writer import RecordWriter
from tests.helpers.code_blocks import read_page
from tests.helpers.system import CHECKOUT
from tests.unit.record.reading import proven_contents

FACTS = {"config": {"a": 1}}


def contents(path):
    """State, rows, names, notes and spans."""
    state, _, found = proven_contents(path)
    rows, spans = np.frombuffer(found["rows"], layout.ROW), np.frombuffer(found["spans"], layout.SPAN)
    return state, rows, found["names"].decode().splitlines(), list(map(json.loads, found["notes"].splitlines())), spans


def test_rows_arrays_notes_and_spans_come_to_the_file(tmp_path):
    record = RecordWriter(tmp_path, FACTS)
    record.row("loss", 1.5, step=1, samples=8)
    others = np.zeros(2, layout.ROW)
    others["series"], others["rank"], others["value"] = record.number("seconds"), (1, 2), (0.25, 0.5)
    record.rows(others)
    spans = np.zeros(2, layout.SPAN)
    spans["lane"], spans["name"], spans["begin"], spans["end"] = (0, 0), (1, 2), (1, 2), (3, 4)
    record.spans(spans, ["compute", "forward", "loss"])
    record.note("save", path="somewhere", seconds=1.0)
    record.row("loss", np.float32(0.5), step=2, samples=16, time=5.0)
    record.close()
    record.close()
    state, rows, names, notes, spans = contents(record.path)
    assert state.is_ended and not state.dropped
    assert names == ["loss", "seconds", "compute", "forward"]
    assert rows[["series", "rank", "step", "samples", "value"]].tolist() == [
        (0, 0, 1, 8, 1.5), (0, 0, 2, 16, 0.5), (1, 1, 0, 0, 0.25), (1, 2, 0, 0, 0.5),
    ]  # fmt: skip
    assert abs(rows["time"][0] - time.time()) < 600 and rows["time"][1] == 5
    assert [note["kind"] for note in notes] == ["save"] and notes[0]["path"] == "somewhere"
    assert spans[["lane", "name", "begin", "end"]].tolist() == [(2, 3, 1, 3), (2, 0, 2, 4)]


def test_it_flushes_by_itself(tmp_path):
    record = RecordWriter(tmp_path, FACTS, flush_seconds=0.01)
    record.row("loss", 1.0, step=1, samples=1)
    deadline = time.monotonic() + 30
    while not contents(record.path)[0].counts["rows"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not contents(record.path)[0].is_ended
    record.close()


def test_names_stay_on_one_line_and_long_ones_are_cut(tmp_path):
    record = RecordWriter(tmp_path, FACTS)
    for name in ("a\nb", "é" * 2000, "\x1b[31m"):
        record.row(name, 1.0, step=0, samples=0)
    record.note("long", text="x" * 10**6)
    record.close()
    _, _, names, notes, _ = contents(record.path)
    assert names == ["a\\nb", "é" * 512, "\\x1b[31m"]
    assert notes[0]["is_cut"] and len(json.dumps(notes[0])) < layout.MOST_NOTE_BYTES


def test_nobody_waits_for_a_file_system_that_does_not_answer(tmp_path, monkeypatch, caplog):
    """A write stands still, as of a server that is away; callers go on, what is too much is counted."""
    gate, stands, passed = threading.Event(), threading.Event(), threading.Event()
    write_at = record_file.write_at

    def stalled(*args):
        stands.set()
        gate.wait(100)
        passed.set()
        write_at(*args)

    monkeypatch.setattr(record_file, "write_at", stalled)
    monkeypatch.setattr(writer, "MOST_WAITING", 1000)
    record = RecordWriter(tmp_path, FACTS, flush_seconds=0.0)
    record.row("loss", 0.0, step=0, samples=0)
    assert stands.wait(30)
    for step in range(1, 2001):
        record.row("loss", 0.0, step=step, samples=0)
    record.rows(np.zeros(2000, layout.ROW))
    record.flush()
    assert not passed.is_set()
    with caplog.at_level(logging.WARNING):
        record.close(0.05)
    assert "is not complete: its file system has not answered for 0.05 s" in caplog.text
    gate.set()
    record._thread.join(30)
    state, rows, *_ = contents(record.path)
    # the first row was on its way already, or its name alone
    assert rows["step"].tolist() == list(range(len(rows))) and len(rows) in (1000, 1001)
    assert state.dropped == 4001 - len(rows) and state.is_ended


@pytest.mark.parametrize("what", ["full", "removed"])
def test_what_goes_wrong_later_is_one_warning(tmp_path, monkeypatch, caplog, what):
    record = RecordWriter(tmp_path / "runs", FACTS, flush_seconds=0.0)
    with caplog.at_level(logging.WARNING):
        if what == "removed":
            shutil.rmtree(tmp_path / "runs")
        else:

            def full(*_):
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(record_file, "write_at", full)
        for step in range(100):
            record.row("loss", 1.0, step=step, samples=1)
            record.note("something")
            time.sleep(0.001)
        record.close()
    assert len(caplog.records) == 1
    assert ("No space left" if what == "full" else "has been moved, removed or replaced") in caplog.text


def test_rows_wait_for_a_disk_that_has_room_again(tmp_path, monkeypatch):
    write_at, refusals = record_file.write_at, []

    def refuses_ten_times(*args):
        if len(refusals) < 10:
            refusals.append(args)
            raise OSError(28, "No space left on device")
        write_at(*args)

    monkeypatch.setattr(record_file, "write_at", refuses_ten_times)
    record = RecordWriter(tmp_path, FACTS, flush_seconds=0.001)
    for step in range(1000):
        record.row("loss", 1.0, step=step, samples=1)
    deadline = time.monotonic() + 30
    while len(refusals) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    record.close()
    state, rows, *_ = contents(record.path)
    assert rows["step"].tolist() == list(range(1000)) and not state.dropped


def test_a_disk_that_stays_full_leaves_the_count_of_what_was_lost(tmp_path, monkeypatch):
    record = RecordWriter(tmp_path, FACTS, reserved={"rows": 10}, flush_seconds=60)
    laid = record_file.lay_out

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_file, "lay_out", full)
    for step in range(100):
        record.row("loss", 1.0, step=step, samples=1)
    record.note("close")
    record.close()
    monkeypatch.setattr(record_file, "lay_out", laid)
    state, rows, names, notes, _ = contents(record.path)
    assert len(rows) + state.dropped == 100 and state.is_ended and names == ["loss"]
    assert [note["kind"] for note in notes] == ["close"]


def test_what_comes_after_a_refusal_is_written_at_the_end_too(tmp_path, monkeypatch):
    write_at, stands = record_file.write_at, threading.Event()

    def refuses_once(*args):
        if not stands.is_set():
            stands.set()
            while not record._is_closing:
                time.sleep(0.001)
            raise OSError(28, "No space left on device")
        write_at(*args)

    monkeypatch.setattr(record_file, "write_at", refuses_once)
    record = RecordWriter(tmp_path, FACTS, flush_seconds=600)
    record.row("loss", 1.0, step=1, samples=1)
    record.flush()
    assert stands.wait(60)
    record.row("loss", 2.0, step=2, samples=2)
    record.note("close")
    record.close(60)
    state, rows, _, notes, _ = contents(record.path)
    assert rows["step"].tolist() == [1, 2] and [note["kind"] for note in notes] == ["close"]
    assert state.is_ended and not state.dropped


SCRIPT = """
import os, sys
from mpispeed.record.writer import RecordWriter
record = RecordWriter(sys.argv[1], {"config": {"a": 1}}, flush_seconds=60)
record.row("loss", 1.0, step=1, samples=1)
child = os.fork()
if child:
    os.waitpid(child, 0)
    record.row("loss", 2.0, step=2, samples=2)
"""


def test_a_script_that_ends_without_a_word_loses_nothing_and_its_forks_write_nothing(tmp_path):
    environ = {**os.environ, "PYTHONPATH": CHECKOUT}
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, env=environ, timeout=60)
    state, rows, *_ = contents(tmp_path / "run.h5")
    assert rows["step"].tolist() == [1, 2] and state.is_ended


def test_the_lines_of_the_guide_read_a_record(tmp_path, monkeypatch, capsys):
    page = read_page("docs/guides/run-record.md")
    (lines,) = [block.text for block in page.blocks if block.language == "python"]
    record = RecordWriter(tmp_path, {"config": {"a": 1}})
    for step in (1, 2):
        record.row("Train/Samples/train_loss", 1 / step, step=step, samples=8 * step)
        record.row("Ranks/step_seconds", 0.5, step=step, samples=8 * step, rank=3)
    record.note("close")
    record.close()
    monkeypatch.chdir(tmp_path)
    found = {}
    exec(lines, found)
    assert capsys.readouterr().out == "[1 2] [1.  0.5]\n"
    assert found["config"] == {"a": 1} and [note["kind"] for note in found["notes"]] == ["close"]
    assert found["slow"]["value"].tolist() == [0.5, 0.5]
