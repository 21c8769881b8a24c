"""Run records that are read: whole ones, those of killed and of running jobs, damaged and hostile ones."""

import json
import os
import random
import resource
import shutil
import sys

import h5py
import numpy as np
import pytest

from mpispeed.native.checksum import crc32c
from mpispeed.record import layout
from mpispeed.record.errors import NoRecord, RecordError
from mpispeed.record.reader import is_record, open_record
from mpispeed.record.runs import open_run
from tests.helpers import mutations
from tests.unit.record.records import FACTS, LOSS, LR, SECONDS, STARTED, note_lines, put, put_state, rows, run_id

SEED, FLIPS, MUTATIONS = 24, 200, 150
NOTES = note_lines({"time": STARTED + 3, "kind": "save", "path": "a"}, {"time": STARTED + 4, "kind": "close"})
SPANS = np.array([(0, 1, 2, 3, STARTED, STARTED + 1, 8)], layout.SPAN)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def everything(record):
    """All that a record says, in values that can be compared bit by bit."""
    return (
        record.run, record.host, record.started, record.facts, record.names, record.rows.tobytes(),
        record.spans().tobytes(), record.notes(), record.is_ended,
    )  # fmt: skip


def test_what_was_written_is_read(path):
    expected = rows(range(1, 5))
    put(path, expected, notes=NOTES, spans=SPANS)
    record = open_record(path)
    assert (record.run, record.host, record.started, record.is_ended) == (
        b"run.h5".hex().ljust(32, "0"),
        "node1",
        STARTED,
        True,
    )
    assert record.facts == FACTS
    assert record.lost is None
    assert record.rows.tobytes() == expected.tobytes()
    assert record.spans().tobytes() == SPANS.tobytes()
    assert [note["kind"] for note in record.notes()] == ["save", "close"]
    assert [(info.name, info.ranks, info.count) for info in record.series()] == [
        (LOSS, (0,), 4), (LR, (0,), 4), (SECONDS, (0, 1), 8),
    ]  # fmt: skip
    points = record.points(SECONDS, 1)
    assert points.step.tolist() == [1, 2, 3, 4]
    assert points.samples.tolist() == [8, 16, 24, 32]
    assert points.value.tolist() == [0.75] * 4
    assert len(record.points(LOSS, 1)) == 0
    with pytest.raises(KeyError):
        record.points("other")
    assert is_record(path)


def test_a_file_that_was_only_laid_out_has_facts_and_no_points(path):
    layout.lay_out(
        path, {"run": "b", "started": STARTED, "host": "x"}, {"config": b"{}"}, dict.fromkeys(layout.TABLES, 4)
    )
    record = open_record(path)
    assert (record.facts, record.series(), record.notes(), record.lost) == ({"config": {}}, [], [], None)
    assert not record.is_ended


def older(path, places, count):
    """A slot of an older flush, with less rows."""
    whole = rows(range(1, 5))
    tables = {
        "rows": whole[:count].tobytes(),
        "names": f"{LOSS}\n{LR}\n{SECONDS}\n".encode(),
        "notes": b"",
        "spans": b"",
    }
    counts = {name: len(raw) // layout.TABLES[name].itemsize for name, raw in tables.items()}
    checksums = {name: crc32c(raw) for name, raw in tables.items()}
    with path.open("r+b") as file:
        put_state(file, places, layout.State(6, counts, checksums))


def damage(path, place, bit=0):
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 1 << bit]))


def test_what_the_last_flush_damaged_is_left_out(path):
    places = put(path, rows(range(1, 5)), sequence=7)
    older(path, places, 12)
    assert len(open_record(path).rows) == 16
    damage(path, places.offsets["rows"] + 15 * layout.ROW.itemsize)
    record = open_record(path)
    assert len(record.rows) == 12
    assert "16 elements of /rows do not have their checksum" in record.lost
    damage(path, places.offsets["rows"])
    with pytest.raises(RecordError, match="its tables are damaged"):
        open_record(path)


def test_a_slot_that_is_half_written_leaves_the_other(path):
    places = put(path, rows(range(1, 5)), sequence=7)
    older(path, places, 12)
    damage(path, places.offsets[layout.STATE] + 7 % layout.SLOTS * layout.SLOT.itemsize + 9)
    record = open_record(path)
    assert len(record.rows) == 12
    assert "slot 1 of /state is damaged" in record.lost
    damage(path, places.offsets[layout.STATE])
    with pytest.raises(RecordError, match="no slot of /state is valid"):
        open_record(path)


def test_dropped_rows_and_damaged_facts_are_told(path):
    put(path, rows(range(1, 3)), dropped=5)
    assert "5 points were dropped" in open_record(path).lost
    content = path.read_bytes()
    place = content.index(b'{"mpispeed"')
    damage(path, place + 3)
    record = open_record(path)
    assert list(record.facts) == ["config"]
    assert "/facts/versions is damaged: it does not have its checksum" in record.lost


# -- files of others --------------------------------------------------------------------------------


def sentence(path):
    """What is said of a file that is refused: one line."""
    with pytest.raises(RecordError) as caught:
        open_record(path)
    said = str(caught.value)
    assert said.isprintable()
    assert path.name in said
    return said


def test_200_flipped_bits_end_in_a_sentence_or_do_no_harm(path):
    put(path, rows(range(1, 30)), notes=NOTES, spans=SPANS)
    content = path.read_bytes()
    # what a flip can meet, without the pages of nothing between
    places = [place for place, byte in enumerate(content) if byte]
    good, pick = everything(open_record(path)), random.Random(SEED)
    sys.stdout.write(f"seed {SEED}\n")
    refused = lost = harmless = 0
    for number in range(FLIPS):
        place = pick.choice(places) if number % 4 else pick.randrange(len(content))
        damage(path, place, bit := pick.randrange(8))
        try:
            record = open_record(path)
        except RecordError as failure:
            assert str(failure).isprintable()
            refused += 1
        else:
            if record.lost is None:
                assert everything(record) == good, f"bit {bit} of byte {place}"
                harmless += 1
            else:
                lost += 1
        damage(path, place, bit)
    assert everything(open_record(path)) == good
    assert refused > 50
    assert harmless > 3
    assert refused + lost + harmless == FLIPS


def test_altered_files_whose_own_checksums_fit_end_in_a_sentence(path):
    put(path, rows(range(1, 6)), notes=NOTES)
    content, pick = path.read_bytes(), random.Random(SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(MUTATIONS):
        altered, what = (mutations.raw if number % 3 == 0 else mutations.hdf5)(pick, content)
        path.write_bytes(altered)
        try:
            open_record(path)
        except RecordError as failure:
            assert str(failure).isprintable(), what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "no ordinary file"),
        (lambda path: os.mkfifo(path), "no ordinary file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"text"), "no HDF5 file"),
        (lambda path: path.symlink_to("nowhere"), "No such file"),
        (lambda path: None, "No such file"),
    ],
    ids=["folder", "fifo", "empty", "text", "broken link", "missing"],
)
def test_what_is_no_record_is_told_in_a_sentence(path, make, said):
    make(path)
    assert said in sentence(path)
    assert not is_record(path)


def test_cut_files_end_in_a_sentence(path):
    put(path, rows(range(1, 5)), notes=NOTES)
    content = path.read_bytes()
    for size in {*range(0, len(content), len(content) // 25), len(content) - 1}:
        path.write_bytes(content[:size])
        sentence(path)


def h5(path, change):
    """A record altered through HDF5."""
    put(path, rows(range(1, 5)), notes=NOTES)
    with h5py.File(path, "r+") as file:
        change(file)


def replaced(name, make):
    def change(file):
        del file[name]
        make(file, name)

    return change


def virtual(file, name):
    source = h5py.VirtualLayout((32,), layout.ROW)
    source[:] = h5py.VirtualSource("other.h5", "rows", (32,), dtype=layout.ROW)
    file.create_virtual_dataset(name, source)


ALTERED = {
    "external link": replaced("rows", lambda file, name: file.__setitem__(name, h5py.ExternalLink("o.h5", "/rows"))),
    "soft link": replaced("rows", lambda file, name: file.__setitem__(name, h5py.SoftLink("/names"))),
    "external group": replaced("facts", lambda file, name: file.__setitem__(name, h5py.ExternalLink("o.h5", "/"))),
    "virtual": replaced("rows", virtual),
    "external storage": replaced(
        "rows",
        lambda file, name: file.create_dataset(name, (32,), layout.ROW, external=[("/etc/passwd", 0, 32 * 40)]),
    ),
    "chunks": replaced("rows", lambda file, name: file.create_dataset(name, (32,), layout.ROW, chunks=(8,))),
    "filter": replaced(
        "rows", lambda file, name: file.create_dataset(name, (32,), layout.ROW, chunks=(8,), compression="gzip")
    ),
    "huge": replaced("rows", lambda file, name: file.create_dataset(name, (1 << 60,), layout.ROW, chunks=(8,))),
    "never written": replaced("rows", lambda file, name: file.create_dataset(name, (1 << 40,), layout.ROW)),
    "other type": replaced("rows", lambda file, name: file.create_dataset(name, (32,), "<f8")),
    "texts": replaced("names", lambda file, name: file.create_dataset(name, (4,), h5py.string_dtype())),
    "two dims": replaced("rows", lambda file, name: file.create_dataset(name, (4, 8), layout.ROW)),
    "scalar": replaced("notes", lambda file, name: file.create_dataset(name, (), "u1")),
    "nothing": replaced("notes", lambda file, name: file.create_dataset(name, data=h5py.Empty("u1"))),
    "group": replaced("spans", lambda file, name: file.create_group(name)),
    "missing": replaced("state", lambda file, name: None),
    "one slot": replaced("state", lambda file, name: file.create_dataset(name, (1,), layout.SLOT)),
    "format": lambda file: file.attrs.__setitem__("format", "mpispeed checkpoint"),
    "format of variable length": lambda file: file.attrs.__setitem__("format", layout.FORMAT),
    "version": lambda file: file.attrs.__setitem__("version", 2),
    "no start": lambda file: file.attrs.__delitem__("started"),
    "start is a text": lambda file: file.attrs.__setitem__("started", np.bytes_(b"yesterday")),
    "start is a row": lambda file: file.attrs.__setitem__("started", [1.0, 2.0]),
    "many facts": lambda file: [file["facts"].create_group(f"x{number}") for number in range(100)],
}


SAID = {
    "external link": "not followed",
    "soft link": "not followed",
    "external group": "/facts is a soft or external link",
    "virtual": "chunked, filtered, virtual",
    "external storage": "in another file",
    "chunks": "chunked",
    "filter": "filtered",
    "huge": "chunked",
    "never written": "do not lie in the file",
    "other type": "is of type float64",
    "texts": "is of type object",
    "two dims": "has not one dim",
    "scalar": "has not one dim",
    "nothing": "has not one dim",
    "group": "/spans is no dataset",
    "missing": "there is no /state",
    "one slot": "do not lie in the file",
    "format": "is an HDF5 file, but no run record",
    "format of variable length": "but no run record",
    "version": "of version 2",
    "no start": "no attribute 'started'",
    "start is a text": "expected a number",
    "start is a row": "expected a number",
    "many facts": "at most 64 facts",
}


@pytest.mark.parametrize("kind", ALTERED)
def test_files_that_lie_are_refused(path, kind):
    other = path.with_name("o.h5")
    put(other, rows(range(1, 9)))
    shutil.copy(other, path.with_name("other.h5"))
    h5(path, ALTERED[kind])
    assert SAID[kind] in sentence(path)


FACTS_OF_OTHERS = {
    "link": lambda group: group.__setitem__("x", h5py.ExternalLink("o.h5", "/facts/config")),
    "group": lambda group: group.create_group("x"),
    "no UTF-8": lambda group: h5py.h5g.create(group.id, b"x\xff"),
    "no checksum": lambda group: group.create_dataset("x", data=np.frombuffer(b"{}", "u1")),
    "no text": lambda group: signed(group, b"\xff\xfe"),
    "deep": lambda group: signed(group, b"[" * 5000 + b"]" * 5000),
    "deeper": lambda group: signed(group, b"[" * 200_000 + b"]" * 200_000),
    "long number": lambda group: signed(group, b"9" * 100_000),
    "no JSON": lambda group: signed(group, b"{'a': 1}"),
}


def signed(group, raw):
    """A fact with its checksum."""
    made = group.create_dataset("x\x1b[31m", data=np.frombuffer(raw, "u1"))
    made.attrs["crc32c"] = crc32c(raw)


@pytest.mark.parametrize("kind", FACTS_OF_OTHERS)
def test_facts_that_lie_are_left_out_and_told(path, kind):
    h5(path, lambda file: FACTS_OF_OTHERS[kind](file["facts"]))
    record = open_record(path)
    assert record.facts == FACTS
    assert "/facts/x" in record.lost
    assert record.lost.isprintable()


def signed_tables(path, **tables):
    """A record whose tables have other bytes, with a state that fits."""
    put(path, tables.get("rows", rows(range(1, 3))), names=tables.get("names", (LOSS, LR, SECONDS)),
        notes=tables.get("notes", b""), spans=tables.get("spans", SPANS[:0]))  # fmt: skip


@pytest.mark.parametrize(
    "tables",
    [
        {"names": (LOSS,)},
        {"spans": np.array([(0, 9, 0, 0, 0, 0, 0)], layout.SPAN)},
        {"spans": np.array([(0, 0, 4_000_000_000, 0, 0, 0, 0)], layout.SPAN)},
        {"spans": np.array([(0, 0, 0, 0, np.nan, 0, 0)], layout.SPAN)},
        {"notes": b"[1]\n"},
        {"notes": b'{"kind": 3, "time": 1}\n'},
        {"notes": b'{"kind": "save", "time": NaN}\n'},
        {"notes": b'{"kind": "save", "time": ' + b"9" * 400 + b"}\n"},
        {"notes": b"\xff\n"},
        {"notes": b"[" * 100_000 + b"\n"},
    ],
)
def test_tables_that_lie_are_refused(path, tables):
    signed_tables(path, **tables)
    sentence(path)


@pytest.mark.parametrize("count", [40, 1 << 30, (1 << 64) - 1])
def test_counts_beyond_a_table_are_refused_before_memory_is_taken(path, count):
    places = put(path, rows(range(1, 5)), sequence=1)
    counts = {**dict.fromkeys(layout.TABLES, 0), "rows": count}
    with path.open("r+b") as file:
        put_state(file, places, layout.State(3, counts))
    assert f"should have {count} elements" in sentence(path)


def test_a_sparse_table_is_not_read_into_memory(path):
    """A hole of 200 GiB costs nobody anything on disk."""
    places = put(path, rows(range(1, 5)), sequence=1)
    size = 5_000_000_000
    with h5py.File(path, "r+") as file:
        del file["rows"]
        kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        kind.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        kind.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(
            file.id, b"rows", h5py.h5t.py_create(layout.ROW, logical=True), h5py.h5s.create_simple((size,)), dcpl=kind
        )
    with path.open("r+b") as file:
        put_state(file, places, layout.State(3, {**dict.fromkeys(layout.TABLES, 0), "rows": size}))
    assert "more than are read" in sentence(path)


def test_names_of_others_do_not_steer_a_terminal(path):
    put(path, rows(range(1, 3)), names=("\x1b[31mred", "b", "c"))
    record = open_record(path)
    assert record.names[0] == "\x1b[31mred"  # whoever shows it escapes it
    assert is_record(path)


# -- several files --------------------------------------------------------------------------------


def test_jobs_of_a_run_are_joined_and_the_later_one_counts(tmp_path):
    first, second = rows(range(1, 11)), rows(range(7, 16), seed=1, ranks=3, started=STARTED + 100)
    second["series"] = np.array([1, 2, 0], np.uint32)[second["series"]]  # other numbers in the other file
    follows = note_lines({"time": STARTED, "kind": "follows", "run": run_id("run.h5")})
    more = {"names": (SECONDS, LOSS, LR), "started": STARTED + 100, "is_ended": False, "notes": follows}
    put(tmp_path / "run-2.h5", second, **more)
    put(tmp_path / "run.h5", first, notes=NOTES)
    (tmp_path / "link.h5").symlink_to("run.h5")
    (tmp_path / ".run.h5.successor.h5").write_bytes(b"half")
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file["x"] = 1
    run = open_run([tmp_path])
    assert [record.path.name for record in run.records] == ["run.h5", "run-2.h5"]
    points = run.points(LOSS)
    assert points.step.tolist() == list(range(1, 16))
    kept = open_record(tmp_path / "run.h5").points(LOSS).value[:6].tolist()
    assert points.value.tolist() == kept + open_record(tmp_path / "run-2.h5").points(LOSS).value.tolist()
    assert len(run.written) == len(first) + len(second)
    assert [info.ranks for info in run.series() if info.name == SECONDS] == [(0, 1, 2)]
    assert len(run.notes()) == 3
    assert run.lost == []
    same = open_run([tmp_path / "run-2.h5", tmp_path / "run.h5"])
    assert same.rows.tobytes() == run.rows.tobytes()


def test_jobs_of_other_runs_in_the_same_folder_are_left_out_and_said_so(tmp_path):
    """Two jobs go on from the first one, the last from none of them; a circle of notes leads nowhere."""
    after = {1: None, 2: 1, 3: 1, 4: None, 5: 5, 6: 7, 7: 6}

    def job(number):
        before = after[number]
        note = {"time": STARTED, "kind": "follows", "run": run_id(f"{before}.h5") if before else 7}
        put(tmp_path / f"{number}.h5", rows(range(number, number + 4)), notes=note_lines(note), started=number)

    for number in (1, 2, 3):
        job(number)
    assert [record.path.name for record in open_run([tmp_path]).records] == ["1.h5", "2.h5", "3.h5"]
    job(4)
    run = open_run([tmp_path])
    assert [record.path.name for record in run.records] == ["4.h5"]
    assert len(run.lost) == 1 and run.lost[0].endswith("left out unless they are named: 1.h5, 2.h5, 3.h5")
    named = [tmp_path / f"{number}.h5" for number in (1, 2, 3)]
    assert len(open_run(named).records) == 3 and not open_run(named).lost
    for number in (5, 6, 7):
        job(number)
    assert {record.path.name for record in open_run([tmp_path]).records} <= {"6.h5", "7.h5"}


def test_copies_of_a_record_count_once(tmp_path):
    own = {"run": "b" * 32, "started": STARTED, "host": ""}
    put(tmp_path / "old.h5", rows(range(1, 4)), attributes=own, is_ended=False)
    put(tmp_path / "run.h5", rows(range(1, 9)), attributes=own)
    shutil.copy(tmp_path / "run.h5", tmp_path / "saved.h5")
    run = open_run([tmp_path, tmp_path / "run.h5"])
    assert [record.path.name for record in run.records] == ["run.h5"]
    assert len(run.written) == len(run.rows) == 32
    assert sorted(sentence.split()[0].rpartition("/")[2] for sentence in run.lost) == ["old.h5", "saved.h5"]


def test_what_a_job_measures_before_its_first_step_does_not_take_the_place_of_that_step(tmp_path):
    names = ("Step/seconds", "eval")
    first = [(series, 0, step, 0, STARTED, step) for step in (1, 2, 3) for series in (0, 1)]
    second = [(1, 0, 3, 0, STARTED + 9, 30), (0, 0, 4, 0, STARTED + 9, 4), (1, 0, 4, 0, STARTED + 9, 40)]
    put(tmp_path / "run.h5", np.array(first, layout.ROW), names=names)
    follows = note_lines({"time": STARTED, "kind": "follows", "run": run_id("run.h5")})
    put(tmp_path / "run-2.h5", np.array(second, layout.ROW), names=names, started=STARTED + 9, notes=follows)
    run = open_run([tmp_path])
    assert run.points("Step/seconds").value.tolist() == [1, 2, 3, 4]
    assert run.points("eval").value.tolist() == [1, 2, 3, 30, 40]


def test_a_damaged_file_of_a_folder_is_told_and_the_others_are_read(tmp_path):
    put(tmp_path / "run.h5", rows(range(1, 4)))
    places = put(tmp_path / "run-2.h5", rows(range(1, 4)))
    damage(tmp_path / "run-2.h5", places.offsets["rows"])
    run = open_run([tmp_path])
    assert len(run.records) == 1
    assert len(run.lost) == 1
    assert "run-2.h5" in run.lost[0]
    (tmp_path / "run.h5").unlink()
    with pytest.raises(RecordError, match=r"run-2\.h5 cannot be read"):
        open_run([tmp_path])
    with pytest.raises(NoRecord, match="has no run record"):
        (tmp_path / "empty").mkdir()
        open_run([tmp_path / "empty"])


def test_facts_are_plain_json(path):
    put(path, facts={"config": {"a": [1, None, "ü", float("nan")]}})
    assert json.dumps(open_record(path).facts) == '{"config": {"a": [1, null, "\\u00fc", NaN]}}'
