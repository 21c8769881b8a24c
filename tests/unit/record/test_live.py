"""A record that is read while it is written, and grows."""

import time

import numpy as np

from mpispeed.record.reader import open_record
from mpispeed.record.runs import open_run
from mpispeed.record.writer import RecordWriter

RESERVED = {"rows": 64, "names": 64, "notes": 256, "spans": 4}
BATCHES, ROWS = 60, 50


def test_every_look_at_a_growing_record_is_whole(tmp_path):
    writer = RecordWriter(tmp_path, {"config": {"a": 1}}, reserved=RESERVED, flush_seconds=0.0)
    seen, lengths = 0, set()
    for batch in range(BATCHES):
        for number in range(batch * ROWS, (batch + 1) * ROWS):
            writer.row(f"s{number // 500}", number / 2, step=number, samples=number, time=1.0)
        writer.note("save", number=batch)
        record, deadline = open_record(writer.path), time.monotonic() + 60
        while batch % 10 == 9 and len(record.rows) == seen:  # the writer's thread has not run for a while
            assert time.monotonic() < deadline
            time.sleep(0.002)
            record = open_record(writer.path)
        assert record.lost is None
        assert not record.is_ended
        assert record.facts == {"config": {"a": 1}}
        np.testing.assert_array_equal(record.rows["step"], np.arange(len(record.rows)))
        assert len(record.rows) >= seen
        seen = len(record.rows)
        lengths.add(seen)
        time.sleep(0.002)
    writer.close()
    assert len(lengths) > 3, "the reader never met a record on its way"
    run = open_run([tmp_path])
    assert run.last.is_ended
    assert run.lost == []
    assert run.rows["value"].tolist() == [number / 2 for number in range(BATCHES * ROWS)]
    assert [note["number"] for note in run.notes()] == list(range(BATCHES))
    assert [info.name for info in run.series()] == [f"s{number}" for number in range(6)]
