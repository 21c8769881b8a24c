"""A writer that is killed at any instant leaves a file that h5py and h5ls open, with all that it had flushed."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpispeed.record import layout
from mpispeed.record.reader import open_record
from tests.helpers.system import CHECKOUT
from tests.unit.record.reading import proven_contents

WORKER = Path(__file__).with_name("kill_worker.py")
KILLS = 50 if os.environ.get("MPISPEED_MATRIX") == "full" else 6
LONGEST_SECONDS = 0.3
RESERVED_ROWS = 512  # as in the worker


def rows_of(numbers):
    """The rows that the worker writes."""
    rows = np.zeros(len(numbers), layout.ROW)
    rows["series"], rows["step"], rows["samples"] = numbers // 1000, numbers, 3 * numbers
    rows["rank"], rows["value"], rows["time"] = numbers % 7, numbers / 2, 1.0
    return rows


@pytest.fixture
def start_writer():
    worker = subprocess.Popen(
        [sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": CHECKOUT},
    )  # fmt: skip

    def start(folder):
        worker.stdin.write(f"{folder}\n")
        worker.stdin.flush()
        return int(worker.stdout.readline())

    yield start
    worker.stdin.close()
    worker.wait(30)
    worker.stdout.close()


def wait_until(happened, deadline):
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def write_and_kill(start_writer, folder, seconds, *, when_grown):
    """The record, and how many rows had been flushed."""
    child, path, deadline = start_writer(folder), folder / "run.h5", time.monotonic() + 60
    wait_until(path.exists, deadline)
    first = path.stat().st_ino
    if when_grown:  # into a larger file, which takes the place of the first
        wait_until(lambda: path.stat().st_ino != first, deadline)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    while Path(f"/proc/{child}").exists():  # until its parent has seen it die
        time.sleep(0.001)
    return path, struct.unpack("<Q", (folder / "proven").read_bytes())[0]


def check(path, flushed):
    """Compare all that is in a record with what the worker wrote; returns whether it has grown."""
    state, capacity, found = proven_contents(path)
    record = open_record(path)
    assert record.rows.tobytes() == found["rows"]
    assert record.lost is None or state.dropped
    rows = np.frombuffer(found["rows"], layout.ROW)
    assert len(rows) >= flushed
    numbers = rows["step"].astype(np.int64)
    if not state.dropped:  # where some are dropped there are gaps, else there are none
        np.testing.assert_array_equal(numbers, np.arange(len(rows)))
    np.testing.assert_array_equal(rows, rows_of(numbers))
    names = found["names"].decode().splitlines()
    assert names == [f"series {index}" for index in range(len(names))]
    assert not len(rows) or rows["series"].max() < len(names)
    counts = [json.loads(line)["number"] for line in found["notes"].splitlines()]
    assert counts == [100 * index for index in range(len(counts))]
    shown = subprocess.run(["h5ls", "-r", path], capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and "/rows" in shown.stdout, shown.stderr
    return capacity > RESERVED_ROWS


def test_a_kill_at_any_instant_leaves_what_was_flushed(tmp_path, start_writer):
    generator, grown = random.Random(24), 0
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        seconds = generator.uniform(0, LONGEST_SECONDS)
        path, flushed = write_and_kill(start_writer, folder, seconds, when_grown=number == KILLS - 1)
        grown += check(path, flushed)
        shutil.rmtree(folder)
    assert grown, "no record was killed after it had grown"
