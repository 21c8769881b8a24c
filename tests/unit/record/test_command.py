"""`mpispeed logs record`, as it is called."""

import csv
import json
import os
import struct
import subprocess

import numpy as np
import pytest

from mpispeed.base.plain import printable
from mpispeed.cli.main import main
from mpispeed.record import layout
from tests.unit.record.records import FACTS, LOSS, LR, SECONDS, STARTED, note_lines, put, rows, run_id

SAVE = {"time": STARTED + 3, "kind": "save", "tag": "step3\x1b[31m\nnext"}


@pytest.fixture
def folder(tmp_path):
    """Two jobs; the second repeats steps 7 to 10 and was killed."""
    put(tmp_path / "run.h5", rows(range(1, 11)), notes=note_lines(SAVE))
    follows, began = {"time": STARTED + 100, "kind": "follows", "run": run_id("run.h5")}, STARTED + 100
    second = rows(range(7, 16), seed=1, started=began)
    put(tmp_path / "run-2.h5", second, started=began, notes=note_lines(follows), is_ended=False)
    return tmp_path


def command(capsys, *words):
    """Exit code, and what the command says on stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["logs", "record", *map(str, words)])
    said = capsys.readouterr()
    return ended.value.code or 0, said.out, said.err


def test_show(capsys, folder):
    code, out, _ = command(capsys, "show", folder)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("on node1  steps 1-10  ended")
    assert lines[1].endswith("on node1  steps 7-15  stopped")
    assert any(line.startswith("state      stopped without an end") for line in lines)
    assert "steps      15, 120 samples" in lines
    assert "repeated   16 points" in out
    row = next(line for line in lines if line.startswith(LOSS))
    assert row.split()[1:4] == ["1", "15", "1-15"]
    assert next(line for line in lines if line.startswith(SECONDS) and "0.75" in line).split() == [
        SECONDS, "2", "0.625", "0.5", "0", "0.75", "1",
    ]  # fmt: skip
    assert "tag=step3\\x1b[31m\\nnext" in out
    assert all(line == printable(line) for line in lines)


def test_show_as_json(capsys, folder):
    code, out, _ = command(capsys, "show", folder, "--json")
    found = json.loads(out)
    assert code == 0
    assert [job["state"] for job in found["jobs"]] == ["ended", "stopped"]
    assert (found["steps"], found["samples"], found["repeated"]) == (15, 120, 16)
    assert found["ranks"][0]["highest_rank"] == 1
    assert found["facts"]["config"]["train_batch_size"] == 8
    assert found["notes"][0] == SAVE and found["notes"][1]["kind"] == "follows"


def test_facts_states_and_waits(capsys, tmp_path):
    """As an engine records them."""
    names = ("Step/seconds", "Ranks/step_seconds", "Ranks/communication_seconds", *(
        f"Communication/all_reduce/data/{what}" for what in ("calls", "bytes", "seconds")))  # fmt: skip
    found = [(0, 0, 1, 8, STARTED + 1, 0.5), (0, 0, 2, 16, STARTED + 2, 0.3)]
    found += [(1, rank, 2, 16, STARTED + 2, 0.5) for rank in range(3)]
    found += [(2, rank, 2, 16, STARTED + 2, 0.1 if rank == 2 else 0.3) for rank in range(3)]
    found += [(3, 0, 2, 16, STARTED + 2, 4.0), (4, 0, 2, 16, STARTED + 2, 4096.0), (5, 0, 2, 16, STARTED + 2, 0.25)]
    facts = {
        "command": {"words": ["python", "-m", "mpispeed.launch.rank", "train.py", "--seed=1"], "folder": "/home/x"},
        "model": {"class": "GPT", "parameters": 7_400_000},
        "plan": {"ranks": "data 3", "stage": "2"},
        "versions": {"mpispeed": "0.1", "torch": "2.13", "other": "5"},
        "slurm": {"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "a\x1b"},
    }
    notes = note_lines(
        {"time": STARTED + 3, "kind": "fault", "text": "ValueError: no"},
        {"time": STARTED + 4, "kind": "close", "state": "failed"},
    )
    put(tmp_path / "run.h5", np.array(found, layout.ROW), names=names, facts=facts, notes=notes)
    _, out, _ = command(capsys, "show", tmp_path)
    lines = out.splitlines()
    assert lines[0].endswith("failed")
    for line in (
        "state      failed 2026-09-21 14:13:24 UTC after 4 s: ValueError: no",
        "command    train.py --seed=1",
        "folder     /home/x",
        "job        job 17, name a\\x1b",
        "model      GPT, 7.4M parameters",
        "ranks      data 3",
        "versions   mpispeed 0.1, torch 2.13",
        "speed      400 ms per step (median)",
        "rank 2 has the most to do: 0.4 s of a step, the median is 0.2 s",
        "all_reduce     data  4      4 KiB  0.25",
    ):
        assert line in lines
    assert not any(line.startswith("Communication/") for line in lines)


@pytest.mark.parametrize("value", [None, 3, [], ["x"], "x", {"words": 3, "class": [], "parameters": -1, "folder": {}}])
def test_facts_of_others_are_any_values(capsys, tmp_path, value):
    facts = dict.fromkeys(("command", "model", "ranks", "plan", "versions", "slurm", "config"), value)
    put(tmp_path / "run.h5", rows(range(1, 3)), facts=facts)
    for words in (["show", tmp_path], ["compare", tmp_path, tmp_path]):
        assert command(capsys, *words)[0] == 0


def test_numbers_that_are_not_finite(capsys, tmp_path):
    odd = rows(range(1, 4))
    odd["value"][odd["series"] == 0] = [np.nan, np.inf, 1.0]
    put(tmp_path / "run.h5", odd, facts={"config": {"x": float("nan")}})
    _, out, _ = command(capsys, "show", tmp_path, "--json")
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (found["series"][0]["first"], found["series"][0]["min"], found["series"][0]["not_finite"]) == ("nan", 1.0, 2)
    _, out, _ = command(capsys, "show", tmp_path)
    assert "3 (2 not finite)" in out
    _, out, _ = command(capsys, "plot", tmp_path)
    assert "rank 0: 2 points are not finite" in out
    odd["value"] = np.nan
    put(tmp_path / "run-2.h5", odd, started=STARTED + 1)
    code, _, _ = command(capsys, "show", tmp_path)
    assert code == 0
    _, out, _ = command(capsys, "plot", tmp_path)
    assert "no points that are finite" in out


def test_a_run_that_goes_on(capsys, tmp_path, monkeypatch):
    put(tmp_path / "run.h5", rows(range(1, 4)), is_ended=False)
    monkeypatch.setattr("time.time", lambda: STARTED + 20)
    _, out, _ = command(capsys, "show", tmp_path)
    assert "state      still running: last written 17 s ago" in out
    monkeypatch.setattr("time.time", lambda: STARTED + 90)
    _, out, _ = command(capsys, "show", tmp_path)
    assert "state      stopped without an end" in out


def test_a_process_that_is_gone_runs_no_more(capsys, tmp_path, monkeypatch):
    own = {"run": "a", "started": STARTED, "host": os.uname().nodename}
    monkeypatch.setattr("time.time", lambda: STARTED + 4)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, said in ((gone.pid, "its process is gone"), (os.getpid(), "still running")):
        path = tmp_path / f"{pid}.h5"
        put(path, rows(range(1, 4)), is_ended=False, attributes=own, facts={"command": {"pid": pid}})
        assert said in command(capsys, "show", path)[1]
    put(tmp_path / "far.h5", rows(range(1, 4)), is_ended=False, facts={"command": {"pid": gone.pid}})
    assert "still running" in command(capsys, "show", tmp_path / "far.h5")[1]


def test_a_run_of_long_steps_is_not_taken_for_dead(capsys, tmp_path, monkeypatch):
    slow = rows(range(1, 6))
    slow["time"] = STARTED + 600 * (slow["step"].astype(float))
    put(tmp_path / "run.h5", slow, is_ended=False)
    monkeypatch.setattr("time.time", lambda: STARTED + 600 * 6)
    assert "still running" in command(capsys, "show", tmp_path)[1]


def test_points(capsys, folder):
    _, out, _ = command(capsys, "show", folder / "run.h5", "--series", "seconds", "--rank", "1")
    lines = [line.split("\t") for line in out.splitlines()]
    assert lines[0] == ["step", "samples", "time", "rank", "value", "series"]
    assert lines[1:] == [[str(n), str(8 * n), str(STARTED + n), "1", "0.75", SECONDS] for n in range(1, 11)]
    _, out, _ = command(capsys, "show", folder, "--series", "*loss", "--json")
    assert [json.loads(line)["step"] for line in out.splitlines()] == list(range(1, 16))
    code, _, err = command(capsys, "show", folder, "--series", "other")
    assert code == 2
    assert f"no series fits other; there are: {LOSS}, {LR}, {SECONDS}" in err


def test_following_ends_with_the_run(capsys, tmp_path, monkeypatch):
    path = tmp_path / "run.h5"
    put(path, rows(range(1, 3)), is_ended=False)
    monkeypatch.setattr("time.time", lambda: STARTED + 3)

    def goes_on(_):
        path.unlink()
        put(path, rows(range(1, 5)))

    monkeypatch.setattr("time.sleep", goes_on)
    _, out, _ = command(capsys, "show", path, "--series", "loss", "--follow")
    assert [line.split("\t")[0] for line in out.splitlines()] == ["step", "1", "2", "3", "4"]


def test_facts(capsys, folder):
    _, out, _ = command(capsys, "show", folder, "--fact", "config")
    assert json.loads(out)["zero_optimization"] == {"stage": 2}
    code, _, err = command(capsys, "show", folder, "--fact", "x\x1b")
    assert code == 2
    assert "has no fact 'x\\x1b'; it has config, versions" in err


def test_a_plot_in_characters(capsys, folder):
    _, out, _ = command(capsys, "plot", folder, "--series", "seconds", "--ranks")
    lines = out.splitlines()
    assert lines[0] == SECONDS
    top, bottom = lines[1], lines[16]
    assert (top.split("|")[0].strip(), bottom.split("|")[0].strip()) == ("0.75", "0.5")
    assert set(top.split("|")[1]) <= {"o", " "}
    assert set(bottom.split("|")[1]) <= {"*", " "}
    assert lines[18].split() == ["1", "step", "15"]


def test_a_picture(capsys, folder, tmp_path):
    put(tmp_path / "other.h5", rows(range(1, 11)), names=("$\\frac$\x1b", LR, SECONDS))
    target = tmp_path / "out.png"
    for words in (["plot", folder / "run.h5", "--ranks", "--x", "time"], ["plot", tmp_path / "other.h5"]):
        code, _, _ = command(capsys, *words, "-o", target)
        assert code == 0
        content = target.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", content[16:24]) > (500, 200)
        target.unlink()


def test_what_is_no_record(capsys, tmp_path):
    (tmp_path / "a.h5").write_bytes(b"text")
    for words in (["show", tmp_path / "a.h5"], ["plot", tmp_path], ["compare", tmp_path, tmp_path]):
        code, out, err = command(capsys, *words)
        assert (code, out) == (2, "")
        assert err.startswith("mpispeed: ")
        assert len(err.splitlines()) == 1


def test_checkpoint_commands_name_the_right_one(capsys, folder):
    for words in (["ls", folder / "run.h5"], ["show", folder / "run.h5"]):
        with pytest.raises(SystemExit) as ended:
            main(["ckpt", *map(str, words)])
        assert ended.value.code == 2
        assert "is a run record and no checkpoint; see it with: mpispeed logs record show" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ckpt", "ls", str(folder)])
    assert "it has run records" in capsys.readouterr().out


# -- compare -----------------------------------------------------------------------------------------------------------


def test_equal_runs(capsys, tmp_path):
    for name in ("a.h5", "b.h5"):
        put(tmp_path / name, rows(range(1, 6)))
    code, out, _ = command(capsys, "compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert code == 0
    assert "facts      the same" in out
    assert f"{LOSS}: equal in every bit at 5 steps" in out


def test_one_bit_is_a_difference(capsys, tmp_path):
    one, other = rows(range(1, 6)), rows(range(1, 6))
    loss = np.flatnonzero(other["series"] == 0)
    other["value"][loss[2]] = np.nextafter(other["value"][loss[2]], 10)
    put(tmp_path / "a.h5", one, facts={**FACTS, "command": {"words": ["x", "--a", "1"], "pid": 1}})
    changed = {"train_batch_size": 16, "bf16": {"enabled": True}}
    facts = {"config": changed, "command": {"words": ["x", "--a", "2"], "pid": 2}}
    put(tmp_path / "b.h5", other, facts=facts)
    code, out, _ = command(capsys, "compare", tmp_path / "a.h5", tmp_path / "b.h5", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["facts"] == [
        {"name": "config.train_batch_size", "a": 8, "b": 16},
        {"name": "config.zero_optimization.stage", "a": 2, "b": "(none)"},
        {"name": "versions.mpispeed", "a": "1", "b": "(none)"},
        {"name": "command.words[2]", "a": "1", "b": "2"},
        {"name": "config.bf16.enabled", "a": "(none)", "b": True},
    ]
    (series,) = found["series"]
    assert (series["different_steps"], series["first_different_step"], series["common_steps"]) == (1, 3, 5)
    assert 0 < series["largest_difference"] < 1e-15
    assert command(capsys, "compare", tmp_path / "a.h5", tmp_path / "b.h5", "--series", LR)[0] == 0
    _, out, _ = command(capsys, "compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert "different at 1 of 5 common steps, first at step 3" in out
    assert "*" in out
    assert "=" in out


def test_missing_steps_and_missing_losses_are_a_difference(capsys, tmp_path):
    put(tmp_path / "a.h5", rows(range(1, 6)))
    put(tmp_path / "b.h5", rows(range(1, 4)))
    code, out, _ = command(capsys, "compare", tmp_path / "a.h5", tmp_path / "b.h5")
    assert code == 1
    assert "equal at 3 common steps" in out
    assert "2 steps only in A, 0 only in B" in out
    for name in ("c.h5", "d.h5"):
        put(tmp_path / name, rows(range(1, 4)), names=("other", LR, SECONDS))
    code, out, _ = command(capsys, "compare", tmp_path / "c.h5", tmp_path / "d.h5")
    assert code == 1
    assert "no losses to compare" in out
    code, out, _ = command(capsys, "compare", tmp_path / "a.h5", tmp_path / "c.h5", "-o", tmp_path / "two.png")
    assert code == 1
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG"


# -- export ------------------------------------------------------------------------------------------------------------


def test_csv(capsys, folder, tmp_path):
    code, _, _ = command(capsys, "export", folder, "--to", "csv", "-o", tmp_path / "csv")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [
        "Train_Samples_lr.csv", "Train_Samples_train_loss.csv",
    ]  # fmt: skip
    with (tmp_path / "csv" / "Train_Samples_lr.csv").open() as file:
        lines = list(csv.reader(file))
    # as the monitors of both jobs wrote them, with what was done twice
    assert lines == [["step", "lr"], *([str(8 * step), "0.001"] for step in (*range(1, 11), *range(7, 16)))]
    code, _, err = command(capsys, "export", folder, "--to", "csv", "-o", tmp_path / "csv")
    assert code == 2
    assert "no empty folder" in err


def test_exports_of_others_stay_in_their_folder(capsys, tmp_path):
    put(tmp_path / "run.h5", rows(range(1, 3)), names=("../../up", "/etc/x", "z" * 600))
    code, _, err = command(capsys, "export", tmp_path / "run.h5", "--to", "csv", "-o", tmp_path / "in" / "csv")
    assert code == 2
    assert "cannot be written: [Errno 36] File name too long" in err
    found = sorted(path.name for path in (tmp_path / "in" / "csv").iterdir())
    assert found == [".._.._up.csv", "_etc_x.csv"]
    put(tmp_path / "run-2.h5", rows(range(1, 3)), names=("a\0b", LR, SECONDS))
    code, _, err = command(capsys, "export", tmp_path / "run-2.h5", "--to", "csv", "-o", tmp_path / "null")
    assert code == 2
    assert "embedded null byte" in err


def test_a_rank_without_points(capsys, folder, tmp_path):
    words = ("export", folder, "--to", "csv", "-o", tmp_path / "csv")
    code, _, err = command(capsys, *words, "--rank", 7)
    assert code == 2
    assert "no points of rank 7" in err
    assert command(capsys, *words, "--rank", 1)[0] == 0
    assert [path.name for path in (tmp_path / "csv").iterdir()] == ["Ranks_step_seconds.csv"]


def test_many_ranks_and_series_do_not_need_many_files(capsys, tmp_path):
    """More series than a process may have files open."""
    count = 1500
    many = np.zeros(count, layout.ROW)
    many["series"], many["step"], many["value"] = np.arange(count), 1, 1.5
    put(tmp_path / "run.h5", many, names=[f"s{number}" for number in range(count)])
    code, _, _ = command(capsys, "export", tmp_path, "--to", "csv", "-o", tmp_path / "csv")
    assert code == 0
    assert len(list((tmp_path / "csv").iterdir())) == count
