"""`mpispeed logs trace`, and the same by export."""

import json

import numpy as np
import pytest

from mpispeed.cli.main import main
from mpispeed.record.layout import SPAN
from tests.unit.record.records import STARTED, note_lines, put, rows, run_id

NAMES = ("Train/Samples/train_loss", "main", "step", "grads", "all_reduce data")
SPANS = np.array(
    [
        (rank, lane, name, 3, STARTED + begin, STARTED + begin + 0.25, size)
        for rank in range(2)
        for lane, name, begin, size in ((1, 2, 0.0, 0), (3, 4, 0.125, 64))
    ],
    SPAN,
)


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main(["logs", *map(str, words)])
    return ended.value.code or 0


@pytest.mark.parametrize("is_export", [False, True])
def test_spans_of_two_jobs_that_number_names_differently(tmp_path, capsys, is_export):
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / "run.h5", rows(range(1, 4)), spans=SPANS, names=NAMES)
    others = SPANS.copy()
    others["lane"], others["name"] = SPANS["lane"] + 1, SPANS["name"] + 1
    others["begin"] += 100
    others["end"] += 100
    follows = note_lines({"time": STARTED + 100, "kind": "follows", "run": run_id("run.h5")})
    put(tmp_path / "run" / "run-2.h5", spans=others, names=("x", *NAMES), started=STARTED + 100, notes=follows)
    path = tmp_path / "out" / "trace.json"
    if is_export:
        assert command("record", "export", tmp_path / "run", "--to", "chrome", "-o", path.parent) == 0
    else:
        path.parent.mkdir()
        assert command("trace", tmp_path / "run", "-o", path) == 0
    assert "8 spans of 2 ranks" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    shown = [(event["pid"], event["name"], event["ts"]) for event in events if event["ph"] == "X"]
    assert sorted(shown) == sorted(
        (rank, name, ts + later)
        for rank in range(2)
        for name, ts in (("step", 0.0), ("all_reduce data", 125000.0))
        for later in (0.0, 1e8)
    )
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"main", "grads"}


def test_a_record_without_spans_and_a_folder_that_is_not_there(tmp_path, capsys):
    put(tmp_path / "run.h5", rows(range(1, 4)))
    assert command("trace", tmp_path / "run.h5", "-o", tmp_path / "trace.json") == 2
    assert "has no spans" in capsys.readouterr().err
    put(tmp_path / "traced.h5", spans=SPANS, names=NAMES)
    assert command("trace", tmp_path / "traced.h5", "-o", tmp_path / "none" / "trace.json") == 2
    assert "cannot be written" in capsys.readouterr().err
