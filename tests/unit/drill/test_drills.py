"""What a drill has to show, and how it is read from what a run wrote."""

import json
import sys

import pytest
from click.testing import CliRunner

from mpispeed.base.errors import UsageError
from mpispeed.cli.drill import drill as command
from mpispeed.drill.catalog import DRILLS, FINISHES, Outcome, check_end, choose, explanations, names_rank, table
from mpispeed.drill.faults import check_ranks, parse_faults
from mpispeed.drill.runner import Reference, Settings, run_drill, run_reference, start

BY_NAME = {drill.name: drill for drill in DRILLS}
KILLED = """10:00:00 [1] WARNING drill kill:rank=1@step=3, on rank 1: the rank gets a signal
mpispeed: notice: waiting for rank 0 at train.py:3 since 3 s
  rank 1 is in no operation
mpispeed: the job ended because rank 1 on n (pid 7) was killed from outside (SIGKILL)
  rank 0 ended as a consequence
Abort(1)
mpispeed: the job was killed (exit code 9 is signal 9, SIGKILL): by the kernel
"""


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_every_fault_of_the_table_can_be_read(drill):
    check_ranks(parse_faults(drill.inject.format(rank=1, step=3, last=2, late="7")), 2)


def failed(checks):
    return [check.name for check in checks if not check.is_passed]


def test_a_run_that_ends_as_it_should():
    assert not failed(check_end(BY_NAME["kill"], Outcome(9, KILLED, 2.0), 1, 60))
    assert failed(check_end(BY_NAME["kill"], Outcome(9, KILLED, 2.0), 2, 60)) == ["names rank 2"]
    assert failed(check_end(BY_NAME["kill"], Outcome(0, KILLED, 2.0), 1, 60)) == ["exit code"]
    assert failed(check_end(BY_NAME["kill"], Outcome(None, KILLED, 60.0), 1, 60)) == ["ends"]
    assert failed(check_end(BY_NAME["error"], Outcome(9, KILLED, 2.0), 1, 60)) == ["names the cause"]
    twice = KILLED + "mpispeed: error: rank 1 once more\n"
    assert failed(check_end(BY_NAME["kill"], Outcome(9, twice, 2.0), 1, 60)) == ["says it once"]
    silent = "Killed\n"
    assert failed(check_end(BY_NAME["kill"], Outcome(9, silent, 2.0), 1, 60)) == [
        "says it once", "names rank 1", "names the cause",
    ]  # fmt: skip


def test_a_run_that_goes_on_as_it_should():
    assert BY_NAME["nan"].end == FINISHES
    assert not failed(check_end(BY_NAME["nan"], Outcome(0, "WARNING step 3 skipped: a gradient is nan\n", 2.0), 1, 60))
    assert failed(check_end(BY_NAME["nan"], Outcome(9, KILLED, 2.0), 1, 60)) == [
        "exit code", "ends quietly", "names the cause",
    ]  # fmt: skip


def test_explanations_come_with_what_belongs_to_them():
    trace = (
        'mpispeed: uncaught error on rank 1; ending the job\nTraceback (most recent call last):\n  File "x", line 1\n'
    )
    found = explanations(f"{trace}ValueError: bad\nsomething else\n" + KILLED)
    assert [text.splitlines()[0][:27] for text in found] == [
        "mpispeed: uncaught error on",
        "mpispeed: the job ended bec",
    ]
    assert found[0].endswith("ValueError: bad")
    assert found[1].endswith("as a consequence")


@pytest.mark.parametrize(("text", "rank", "wanted"), [
    ("rank 1 left", 1, True), ("rank 11 left", 1, False), ("ranks 0, 2-4 wait", 3, True),
    ("ranks 0, 2-4 wait", 1, False), ("(rank 2)", 2, True), ("4 ranks", 4, False), ("rank 1 of 2: x", 2, False),
])  # fmt: skip
def test_names_of_ranks(text, rank, wanted):
    assert names_rank(text, rank) == wanted


def test_one_rank_alone_has_fewer_drills():
    drills, left_out = choose("all", 1)
    assert "kill" in [drill.name for drill in drills]
    assert "missing" in left_out
    assert len(drills) + len(left_out) == len(DRILLS)
    assert [drill.name for drill in choose("nan, kill", 2)[0]] == ["nan", "kill"]
    with pytest.raises(KeyError, match="dance"):
        choose("kill,dance", 2)


# A script that obeys the protocol without the library, so that all verdicts can be had in no time.
SCRIPT = """
import os, sys
fault = os.environ.get("MPISPEED_INJECT", "")
if fault.startswith("kill"):
    if "silent" not in sys.argv:
        print("mpispeed: the job ended because rank 0 was killed")
    sys.exit(9)
print("ranks", sys.argv[1:])
"""


def settings(tmp_path, *arguments):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Settings([sys.executable, str(script)], arguments, [], tmp_path / "out", 0, 30.0, 1.0, 2.0)


def test_a_drill_without_checkpoints_says_that_they_were_not_looked_at(tmp_path):
    good = settings(tmp_path)
    assert run_reference(good) == Reference()
    result = run_drill(BY_NAME["kill"], good, Reference())
    assert result.is_passed
    assert "{dir}" in result.notes[0]
    bad = run_drill(BY_NAME["kill"], settings(tmp_path, "silent"), Reference())
    assert failed(bad.checks) == ["says it once", "names rank 0", "names the cause"]
    lines = table([result, bad], {"order": "needs at least 2 ranks"})
    assert [line.split()[:2] for line in lines if line.startswith(("kill", "order"))] == [
        ["kill", "pass"], ["kill", "FAIL"], ["order", "-"],
    ]  # fmt: skip
    assert lines[-1] == "1 of 2 drills passed"
    assert json.dumps(bad.as_row())


def test_what_is_around_a_drill_does_not_change_it(tmp_path, monkeypatch):
    for name in ("MPISPEED_INJECT", "MPISPEED_WATCH", "MPISPEED_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.setenv(name, "5")
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(*(f'{name}={value}' for name, value in os.environ.items() if value == '5'))\n")
    around = Settings([sys.executable, str(script)], (), [], tmp_path / "out", 0, 30.0, 1.0, 2.0)
    outcome = start(around, tmp_path / "out", "output.txt", "")
    assert (outcome.code, outcome.output.strip()) == (0, "")


def test_a_drill_that_still_runs_at_its_limit_is_ended(tmp_path):
    script = tmp_path / "sleeper.py"
    script.write_text("import time\ntime.sleep(60)\n")
    patient = Settings([sys.executable, str(script)], (), [], tmp_path / "out", 0, 0.5, 1.0, 2.0)
    assert failed(run_drill(BY_NAME["kill"], patient, Reference()).checks) == ["ends"]


def test_the_place_of_a_fault_is_behind_the_first_checkpoint():
    assert Reference(None, (2, 4, 6)).step == 3
    assert Reference(None, (2, 4, 6)).saves == 3
    assert Reference().step == 2


@pytest.mark.parametrize(("words", "part"), [
    (["dance", "x.py"], "there is no drill 'dance'"),
    (["kill", "none.py"], "there is no script none.py"),
    (["--rank", "2", "kill", "none.py"], "--rank 2"),
    (["-n", "1", "order", "none.py"], "one rank alone"),
    (["order", "-n", "1", "none.py", "-n", "2"], "one rank alone"),
    (["kill,corrupt", "-n", "3", "none.py", "-n", "2"], "no script none.py"),
    (["kill", "-n", "3", "--limit", "9", "none.py"], "write mpispeed drill kill -n 3 SCRIPT"),
    (["-n", "2", "kill", "--rank", "2", "none.py"], "--rank 2"),
    (["kill", "--dance", "none.py"], "there is no option --dance"),
])  # fmt: skip
def test_refusals(words, part):
    done = CliRunner().invoke(command, words)
    assert done.exit_code != 0
    assert part in str(done.exception)


@pytest.mark.parametrize("words", [[], ["kill"], ["kill", "-n", "2"], ["-n", "2", "kill"], ["kill", "-n"]])
def test_what_is_missing_is_named(words):
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert "Missing argument" in done.output or "requires an argument" in done.output


def test_the_list_shows_every_drill():
    shown = CliRunner().invoke(command, ["--list"]).output
    assert all(drill.name in shown for drill in DRILLS)


def test_resume_args_with_an_open_quote_are_named(tmp_path):
    (tmp_path / "train.py").touch()
    words = ["kill", "--resume-args", "a'b", "--out", str(tmp_path / "out"), str(tmp_path / "train.py")]
    with pytest.raises(UsageError, match=r"--resume-args a'b: .*No closing quotation"):
        CliRunner().invoke(command, words, catch_exceptions=False)
