"""The file of a run record: its name, its writes one by one, its successors, and file systems that refuse."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest

from mpispeed.record import layout, record_file
from mpispeed.record.record_file import Contents, RecordFile
from tests.helpers.system import CHECKOUT
from tests.unit.record.reading import proven_contents

CONTENTS = Contents({"run": "id", "started": 1.5}, {"config": layout.fact({"a": 1})})
SMALL = {"rows": 16, "names": 64, "notes": 256, "spans": 4}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def rows_of(first, count):
    rows = np.zeros(count, layout.ROW)
    rows["step"], rows["value"] = np.arange(first, first + count), np.arange(first, first + count) / 4
    return rows.tobytes()


def test_a_record_is_plain_hdf5_for_its_owner_alone(tmp_path):
    old = os.umask(0)
    try:
        file = RecordFile(tmp_path / "runs", CONTENTS, SMALL)
    finally:
        os.umask(old)
    file.append({"rows": rows_of(0, 3), "names": b"a\n", "notes": b'{"kind": "x"}\n'})
    file.close()
    assert file.path == tmp_path / "runs" / "run.h5"
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert names_in(tmp_path / "runs") == ["run.h5"]
    with h5py.File(file.path) as plain:
        assert dict(plain.attrs) == {"format": b"mpispeed run record", "version": 1, "run": b"id", "started": 1.5}
        state = max(plain["state"][...], key=lambda slot: slot["sequence"])
        assert plain["rows"][: state["rows"]]["value"].tolist() == [0, 0.25, 0.5]
        assert plain["rows"].chunks is None and plain["rows"].compression is None
        assert json.loads(plain["facts/config"][...].tobytes()) == {"a": 1}


def test_a_record_never_takes_the_name_of_another(tmp_path):
    files = [RecordFile(tmp_path, CONTENTS, SMALL) for _ in range(3)]
    named = [RecordFile(tmp_path / "mine.h5", CONTENTS, SMALL) for _ in range(2)]
    for file in (*files, *named):
        file.close()
    assert [file.path.name for file in files] == ["run.h5", "run-2.h5", "run-3.h5"]
    assert [file.path.name for file in named] == ["mine.h5", "mine-2.h5"]


@pytest.mark.parametrize("has_links", [True, False])
def test_many_that_start_at_once_have_a_name_each(tmp_path, monkeypatch, has_links):
    if not has_links:

        def refuse(*_):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(record_file.os, "link", refuse)
    found = []

    def make():
        for _ in range(5):
            file = RecordFile(tmp_path, CONTENTS, SMALL)
            file.append({"rows": rows_of(len(found), 1)})
            found.append(file)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({file.path for file in found}) == 20
    for file in found:
        assert proven_contents(file.path)[0].counts["rows"] == 1
        file.close()
    assert len(names_in(tmp_path)) == 20


def test_every_write_leaves_a_file_that_proves_what_was_flushed(tmp_path, monkeypatch):
    """Every write is cut in half once, and looked at from outside after each half; tables are outgrown four times."""
    write_at, seen, growths = record_file.write_at, [], set()
    file = RecordFile(tmp_path, CONTENTS, SMALL)

    def look():
        state, capacity, found = proven_contents(file.path)
        assert np.frombuffer(found["rows"], layout.ROW)["step"].tolist() == list(range(state.counts["rows"]))
        assert state.counts["rows"] >= (seen[-1] if seen else 0)
        growths.add(capacity)

    def in_halves(handle, data, offset):
        for part, place in ((data[: len(data) // 2], offset), (data[len(data) // 2 :], offset + len(data) // 2)):
            write_at(handle, part, place)
            look()

    monkeypatch.setattr(record_file, "write_at", in_halves)
    monkeypatch.setattr(record_file, "PIECE_BYTES", 4 * layout.ROW.itemsize)
    done = 0
    for count in (1, 5, 4, 4, 9, 2, 30, 1, 1, 60):
        note = json.dumps({"kind": "x", "number": done}) + "\n"
        file.append({"rows": rows_of(done, count), "notes": note.encode(), "names": b"name\n"})
        done += count
        seen.append(done)
        look()
        while file.advance():
            look()
    assert len(growths) >= 4
    assert proven_contents(file.path)[0].counts["rows"] == done
    file.close()
    assert names_in(tmp_path) == ["run.h5"]


def test_a_burst_larger_than_the_successor_has_one_of_its_own(tmp_path):
    file = RecordFile(tmp_path, CONTENTS, SMALL)
    file.append({"rows": rows_of(0, 13)})  # three quarters: a successor is begun
    file.append({"rows": rows_of(13, 1000)})
    assert np.frombuffer(proven_contents(file.path)[2]["rows"], layout.ROW)["step"].tolist() == list(range(1013))
    file.close()
    assert names_in(tmp_path) == ["run.h5"]


def test_a_successor_leaves_the_file_that_has_its_name_by_now(tmp_path):
    file = RecordFile(tmp_path, CONTENTS, SMALL)
    file.append({"rows": rows_of(0, 13)})
    file.path.rename(tmp_path / "moved.h5")
    file.path.write_text("of another run")
    with pytest.raises(OSError, match="cannot be made larger: another file has its name by now"):
        file.append({"rows": rows_of(13, 100)})
    assert file.path.read_text() == "of another run"
    assert proven_contents(tmp_path / "moved.h5")[0].counts["rows"] == 13
    file.close()
    assert names_in(tmp_path) == ["moved.h5", "run.h5"]


LIMITED = """
import os, resource, sys
from pathlib import Path
import numpy as np
from mpispeed.record import layout, record_file
contents = record_file.Contents({}, {"config": b'{"a": 1}'})
file = record_file.RecordFile(Path(sys.argv[1]), contents, {"rows": 400, "names": 64, "notes": 256, "spans": 4})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
rows = np.zeros(100, layout.ROW)
for number in range(4):
    rows["step"] = np.arange(100 * number, 100 * number + 100)
    file.append({"rows": rows.tobytes()})
    assert not file.advance()
try:
    file.append({"rows": rows.tobytes()})
except OSError as error:
    text = str(error)
file.append({"notes": b'{"kind": "close"}\\n'}, dropped=100, is_ended=True)
assert "full and cannot be made larger" in text and "File too large" in text, text
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
record_file.RETRY_SECONDS = 0
file._may_grow_at = 0
file.append({"rows": rows.tobytes()})
assert file.state.counts["rows"] == 500
file.close()
"""


def test_a_record_that_cannot_grow_says_so_and_keeps_what_it_has(tmp_path):
    """The limit on the size of files stands in for a full disk; with more room it grows after all."""
    environ = {**os.environ, "PYTHONPATH": CHECKOUT}
    subprocess.run([sys.executable, "-c", LIMITED, tmp_path], check=True, env=environ, timeout=60)
    _, _, found = proven_contents(tmp_path / "run.h5")
    assert np.frombuffer(found["rows"], layout.ROW)["step"].tolist() == [*range(400), *range(300, 400)]
    assert names_in(tmp_path) == ["run.h5"]


def test_a_path_that_cannot_be_written_is_an_error_at_the_start_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        RecordFile(tmp_path / "file", CONTENTS, SMALL)
    with pytest.raises(OSError):
        RecordFile(tmp_path / "file" / "run.h5", CONTENTS, SMALL)
    assert names_in(tmp_path) == ["file"]


def test_the_state_of_a_slot_survives_any_flip_of_one_bit(tmp_path):
    first = layout.State(1, dict.fromkeys(layout.TABLES, 3), dict.fromkeys(layout.TABLES, 5), 7)
    second = layout.State(2, dict.fromkeys(layout.TABLES, 4), dict.fromkeys(layout.TABLES, 6), 8, is_ended=True)
    raw = second.packed() + first.packed()
    assert layout.latest_state(raw) == second
    assert layout.latest_state(bytes(2 * layout.SLOT.itemsize)) is None
    for bit in range(8 * layout.SLOT.itemsize):
        broken = bytearray(raw)
        broken[bit // 8] ^= 1 << bit % 8
        assert layout.latest_state(bytes(broken)) == first


def test_what_killed_runs_left_unfinished_is_removed_after_a_day(tmp_path):
    for name in (".run-a.unfinished", ".run.h5.successor", ".run-b.unfinished", "other"):
        (tmp_path / name).write_text("")
        if name != ".run-b.unfinished":
            os.utime(tmp_path / name, (1, 1))
    RecordFile(tmp_path, CONTENTS, SMALL).close()
    assert names_in(tmp_path) == [".run-b.unfinished", "other", "run.h5"]
    assert (tmp_path / "run.h5").stat().st_nlink == 1
