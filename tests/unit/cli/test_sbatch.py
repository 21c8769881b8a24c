"""`mpispeed sbatch` where no SLURM answers: what it makes of a config and a plan, and which chains it refuses."""

import json
import shutil

import pytest
from click.testing import CliRunner

from mpispeed.base.errors import MpispeedError
from mpispeed.cli.sbatch import sbatch

SIZE = ("--params", "1e9", "--largest-layer", "1e8")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the command in a folder with a script and a config; the last arguments are keys of the config."""
    monkeypatch.chdir(tmp_path)
    tools = tmp_path / "tools"  # without SLURM, also on a machine that has one
    tools.mkdir()
    (tools / "bash").symlink_to(shutil.which("bash"))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("MPISPEED_SITE", raising=False)
    (tmp_path / "train.py").touch()

    def run(*words, **keys):
        (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **keys}))
        first = ("--dry-run", "--time", "10", "--cpus-per-task", "2", "--run-dir", "/run")
        return CliRunner().invoke(sbatch, [*first, *map(str, words)])

    def submit(*words, **keys):
        (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, **keys}))
        return CliRunner().invoke(sbatch, ["--time", "10", "--cpus-per-task", "2", *map(str, words)])

    run.submit = submit
    return run


def text_of(done):
    """What went wrong, for people."""
    return str(done.exception) if isinstance(done.exception, MpispeedError) else done.output


def test_plan_gives_the_memory(call):
    done = call("--config", "ds.json", *SIZE, "--ntasks-per-node", 2, "train.py", "--steps", 3)
    assert done.exit_code == 0, text_of(done)
    assert "GO: 2 ranks" in done.stderr
    # More than the 2 x (4 + 4 bytes, and 12 / 2 bytes of optimizer) of each parameter, less than twice as much.
    mem = next(line for line in done.stdout.splitlines() if line.startswith("#SBATCH --mem="))
    assert 26_000 < int(mem.removeprefix("#SBATCH --mem=").rstrip("M")) < 52_000
    assert "train.py --steps 3 --deepspeed_config ds.json)" in done.stdout


def test_no_go_is_not_submitted(call):
    done = call("--config", "ds.json", *SIZE, "--mem", "4GiB", "train.py")
    assert done.exit_code == 1
    assert "NO-GO: " in done.stderr
    assert "would fit: " in done.stderr
    assert "#SBATCH" not in done.stdout
    done = call("--config", "ds.json", *SIZE, "--mem", "4GiB", "--no-plan", "train.py")
    assert done.exit_code == 0
    assert "#SBATCH --mem=4096M" in done.stdout


def test_config_is_found_in_the_arguments_and_checked(call):
    done = call("train.py", "--deepspeed_config", "ds.json", zero_optimisation={"stage": 1})
    assert isinstance(done.exception, MpispeedError)
    assert "zero_optimization" in text_of(done)
    done = call("train.py", "--deepspeed_config=ds.json")
    assert "give the model with --model" in done.stderr
    assert done.exit_code == 0


@pytest.mark.parametrize(
    ("words", "walltime", "has"),
    [
        ((), {}, "# One node"),
        ((), {"save_dir": "ckpt"}, "#SBATCH --signal=B:USR1@90"),
        (("--time", "4:00:00"), {"save_dir": "ckpt"}, "#SBATCH --signal=B:USR1@120"),
        (("--time", "2"), {"save_dir": "ckpt"}, "trap 'signalled=1; pass_on' TERM"),
        ((), {"save_dir": "ckpt", "signals": ["TERM"]}, "trap 'signalled=1; :' TERM"),
        (("--signal-seconds", 0), {"save_dir": "ckpt"}, "# One node"),
        ((), {"save_dir": "ckpt", "chain": "requeue"}, 'scontrol requeue "$SLURM_JOB_ID"'),
        (("--image", "x.sif"), {"save_dir": "ckpt", "chain": "requeue"}, 'scontrol requeue "$SLURM_JOB_ID"'),
    ],
)
def test_run_that_saves_in_time_gets_a_signal_and_its_chain(call, words, walltime, has):
    done = call(*words, "--config", "ds.json", "train.py", walltime=walltime)
    assert done.exit_code == 0, text_of(done)
    assert has in done.stdout
    is_signalled = bool(walltime) and "signals" not in walltime and "--signal-seconds" not in words and "2" not in words
    assert ("#SBATCH --signal" in done.stdout) is is_signalled


@pytest.mark.parametrize(
    ("words", "chain", "message"),
    [
        (("--template", "single"), "requeue", "the template single does not requeue"),
        (("--array", "0-1"), "requeue", "the template array does not requeue"),
        (("--template", "requeue"), "dependency", 'set it to "requeue"'),
        (("--image", "x.sif"), "dependency", "there is no sbatch in a container"),
    ],
)
def test_two_ways_of_going_on_are_refused(call, words, chain, message):
    done = call(*words, "--config", "ds.json", "train.py", walltime={"save_dir": "ckpt", "chain": chain})
    assert isinstance(done.exception, MpispeedError)
    assert message in text_of(done)


def test_missing_script_and_missing_slurm_are_told(call, tmp_path):
    assert "there is no script nothing.py" in text_of(call("nothing.py"))
    (tmp_path / "train.py").touch()
    done = CliRunner().invoke(sbatch, ["--time=1", "--cpus-per-task=1", "--run-dir", str(tmp_path / "r"), "train.py"])
    assert isinstance(done.exception, MpispeedError)
    assert "there is no sbatch here" in text_of(done)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"walltime": {"save_dir": "ck"}}, "to save and stop: touch {run}/STOP; to save and go on: touch {run}/SAVE"),
        ({"walltime": {"save_dir": "ck", "enabled": False}}, "cannot be asked to save: its config has no"),
        ({}, "cannot be asked to save: its config has no walltime.save_dir"),
        (None, "where the script's config has walltime.save_dir, touch {run}/STOP"),
    ],
)
def test_the_file_stop_is_named_where_something_listens(call, tmp_path, keys, said):
    """With a program in the place of SLURM's that takes the script."""
    (tmp_path / "tools" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "tools" / "sbatch").chmod(0o755)
    run = tmp_path / "run"
    done = call.submit("--run-dir", run, *([] if keys is None else ["--config", "ds.json"]), "train.py", **(keys or {}))
    assert done.exit_code == 0, text_of(done)
    assert "job 7" in done.output
    assert said.format(run=run) in done.output


def test_a_batch_that_the_tasks_do_not_divide_is_refused(call):
    words = ("--ntasks-per-node", 5, "train.py", "--deepspeed_config", "ds.json")
    keys = {"train_micro_batch_size_per_gpu": None, "train_batch_size": 12}
    done = call(*words, **keys)
    assert done.exit_code and "#SBATCH" not in done.stdout
    assert "12 is not 2 * 1 * 5 = 10 on 5 data-parallel ranks; set train_batch_size to 10 or 15" in text_of(done)
    assert call("--ranks-per-model", 5, *words, **keys).exit_code == 0
    assert "5 ranks are no multiple of the 2 that share" in text_of(call("--ranks-per-model", 2, *words, **keys))
    assert call(*words, **{**keys, "train_batch_size": 15}).exit_code == 0


def test_who_shares_models_or_counts_tasks_otherwise_is_told_how(call):
    """What the script cuts by itself is not in the config."""
    words = ("--ntasks-per-node", 5, "train.py", "--deepspeed_config", "ds.json")
    keys = {"train_micro_batch_size_per_gpu": None, "train_batch_size": 12}
    hint = "; if ranks share each model, say how many with --ranks-per-model"
    for more in ({}, {"seeed": 1}):
        assert text_of(call(*words, **keys, **more)).endswith(hint)
    assert hint not in text_of(call(*words, seeed=1))
    assert hint not in text_of(call("--ranks-per-model", 2, *words, **keys))
    assert call("--flag", "--ntasks=4", *words, **keys).exit_code == 0


def test_all_that_a_run_would_refuse_is_refused_before(call):
    done = call("train.py", "--deepspeed_config", "ds.json", optimizer={"type": "AdamX"}, seeed=1, hybrid_engine=True)
    assert done.exit_code and "#SBATCH" not in done.stdout
    for said in (
        "3 problems",
        "seeed: unknown key",
        'unknown optimizer "AdamX"',
        "hybrid_engine: the hybrid engine is not available",
    ):
        assert said in text_of(done)


def test_a_job_without_a_config_is_said_to_be_unchecked(call):
    done = call("train.py")
    assert done.exit_code == 0 and "#SBATCH" in done.stdout
    assert "no config is checked, and memory is not planned: none is given; give it with --config" in done.stderr
    done = call("--no-plan", "train.py", "--deepspeed_config", "task-{task}.json")
    assert "no config is checked, and memory is not planned: there is no file task-{task}.json" in done.stderr
