"""`mpispeed plan --schedule`: drawing, proof and bubble; without torch; one clear message for what is wrong."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mpispeed.cli.main import cli

OWN = """
from mpispeed.pipe import instructions as do
from mpispeed.pipe.schedule_base import PipeSchedule

class Alone(PipeSchedule):
    def steps(self):
        for batch in range(self.micro_batches):
            yield [do.LoadMicroBatch(0), do.ForwardPass(0)]

class Broken(Alone):
    def num_pipe_buffers(self):
        return 0

class Odd(Alone):
    def __init__(self):
        pass

NUMBER = 5
"""


def call(*words):
    return CliRunner().invoke(cli, ["plan", *map(str, words)])


def asked(*words):
    done = call(*words, "--json")
    return done, json.loads(done.stdout)


def test_text():
    done = call("--schedule", "1f1b", "--stages", 4, "--micro-batches", 8)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "1f1b: 4 stages x 8 micro-batches"
    assert lines[5].startswith("stage 3 |.  .  .  F0 B0--- F1 B1---")
    assert lines[8].split() == ["0", "9", "4", "4", "0", "3"]
    assert "length 33, idle 27.3 %; closed form: 9 per stage" in lines
    assert "no deadlock, also with blocking sends, also with a barrier after every step" in done.stdout


def test_json():
    done, answer = asked("--schedule", "zb-h1", "--stages", 4, "--micro-batches", 8)
    assert done.exit_code == 0
    assert (answer["ok"], answer["chunks"], answer["length"], answer["closed_form"]) == (True, 1, 27.0, 3.0)
    assert (answer["survives_blocking_sends"], answer["survives_barriers"]) == (False, True)
    assert [stage["buffers"] for stage in answer["per_stage"]] == [4, 3, 2, 1]
    assert [stage["peak_held"] for stage in answer["per_stage"]] == [4] * 4
    first = answer["per_stage"][3]["passes"][0]
    assert first == {"pass": "F", "chunk": 0, "micro_batch": 0, "start": 3.0, "end": 4.0}
    assert {one["pass"] for one in answer["per_stage"][0]["passes"]} == {"F", "I", "W"}


def test_chunks_and_times():
    _, two = asked("--schedule", "interleaved", "--stages", 4, "--micro-batches", 8)
    assert (two["chunks"], two["length"]) == (2, 28.5)
    _, four = asked("--schedule", "interleaved", "--stages", 4, "--micro-batches", 8, "--chunks", 4)
    assert (four["chunks"], four["closed_form"]) == (4, 2.25)
    _, uneven = asked("--schedule", "interleaved", "--stages", 4, "--micro-batches", 7)
    assert uneven["closed_form"] is None
    _, slow = asked("--schedule", "gpipe", "--stages", 2, "--micro-batches", 2, "--times", 0.1, 0.2, 0.3)
    assert slow["length"] == pytest.approx(1.8, abs=1e-12)
    done = call("--schedule", "interleaved", "--stages", 4, "--micro-batches", 7)
    assert "4 stages x 7 micro-batches x 2 chunks" in done.stdout
    assert "no closed form for these numbers" in done.stdout


def test_picture(tmp_path):
    file = tmp_path / "drawing.png"
    done = call("--schedule", "zb-h1", "--stages", 2, "--micro-batches", 2, "--png", file)
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedule", "1f1b"], "give --stages and --micro-batches"),
        (["--schedule", "1f1b", "--stages", 2], "give --stages and --micro-batches"),
        (["--schedule", "1f2b", "--stages", 2, "--micro-batches", 2], 'Did you mean "1f1b"?'),
        (["--schedule", "1f1b", "--stages", 2, "--micro-batches", 2, "--chunks", 2], "it has one; use 'interleaved'"),
        (["--schedule", "interleaved", "--stages", 1, "--micro-batches", 2], "need at least 2 stages"),
        (["--schedule", "1f1b", "--stages", 2, "--micro-batches", 2, "--times", -1, 1, 1], "expected at least 0"),
        (["--schedule", "1f1b", "--stages", 2, "--micro-batches", 2, "--times", 1, 1, 1e-9], "larger common unit"),
        (["--schedule", "1f1b", "ds.json"], "leave out CONFIG and -n"),
        (["--schedule", "1f1b", "-n", 2], "leave out CONFIG and -n"),
        (["ds.json"], "give CONFIG and the number of ranks, -n or --ranks"),
        (["-n", 2], "give CONFIG and the number of ranks, -n or --ranks"),
        (["ds.json", "-n", 2, "--micro-batches", 4], "--micro-batches says how a pipeline schedule is drawn"),
        (["ds.json", "-n", 2, "--png", "x.png"], "--png says how a pipeline schedule is drawn"),
        (["--schedule", "no_module_here:X", "--stages", 1, "--micro-batches", 1], "cannot be imported"),
    ],
)
def test_wrong_questions(words, said):
    done = call(*words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert not done.stdout


def test_errors_as_json():
    done, answer = asked("--schedule", "1f1b")
    assert done.exit_code == 2
    assert answer["ok"] is False
    assert "--stages" in answer["error"]


def test_a_schedule_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_schedules.py").write_text(OWN)
    shape = ("--stages", 1, "--micro-batches", 3)
    good = call("--schedule", "own_schedules:Alone", *shape)
    assert good.exit_code == 0, good.output
    assert "stage 0 |F0 F1 F2" in good.stdout
    bad = call("--schedule", "own_schedules:Broken", *shape)
    assert bad.exit_code == 1
    assert "stage 0, step 0, LoadMicroBatch(buffer_id=0): this stage has 0 buffers" in bad.stderr
    odd = call("--schedule", "own_schedules:Odd", *shape)
    assert (odd.exit_code, "cannot be made from" in odd.stderr) == (2, True)
    number = call("--schedule", "own_schedules:NUMBER", *shape)
    assert (number.exit_code, "expected a class derived from" in number.stderr) == (2, True)


def test_torch_is_not_needed():
    code = (
        "import sys; from mpispeed.cli.main import main\n"
        "try: main(['plan', '--schedule', '1f1b', '--stages', '2', '--micro-batches', '2'])\n"
        "except SystemExit as end: print('end', end.code)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *drawing, end, modules = done.stdout.splitlines()
    assert end == "end 0"
    assert drawing[2].startswith("stage 0 |F0")
    assert not {"torch", "mpi4py", "matplotlib"} & set(modules.split())
