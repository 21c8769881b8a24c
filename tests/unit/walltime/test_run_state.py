"""state.json: replaced in one go, read back, and damaged ones count as none."""

import json
from dataclasses import asdict

import pytest

from mpispeed.walltime import run_state
from mpispeed.walltime.run_state import RunState


def test_round_trip(tmp_path):
    folder = tmp_path / "a" / "run"
    state = RunState("interrupted", "t", 7, "the job ends", job="12", first_step=3, save_seconds=1.5, next_job="13")
    assert run_state.read(folder) is None
    state.write(folder)
    assert run_state.read(folder) == state
    assert json.loads((folder / "state.json").read_text()) == asdict(state)
    RunState("finished").write(folder)
    assert run_state.read(folder).state == "finished"
    assert [path.name for path in folder.iterdir()] == ["state.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"state": 3}', "\x00\xff"])
def test_what_cannot_be_read_is_nothing(tmp_path, text):
    (tmp_path / "state.json").write_bytes(text.encode("latin-1"))
    assert run_state.read(tmp_path) is None


def test_values_of_another_kind_are_left_out(tmp_path):
    (tmp_path / "state.json").write_text('{"state": "running", "step": "x", "save_seconds": 2.5, "other": 1}')
    found = run_state.read(tmp_path)
    assert (found.state, found.step, found.save_seconds) == ("running", 0, 2.5)


def test_a_folder_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "state.json").mkdir()
    with pytest.raises(OSError):
        RunState("running").write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_where_it_lies(tmp_path):
    assert run_state.run_folder({}, tmp_path) == tmp_path
    assert run_state.run_folder({"MPISPEED_RUN_DIR": ""}, tmp_path) == tmp_path
    assert str(run_state.run_folder({"MPISPEED_RUN_DIR": "x"}, tmp_path)) == "x"
