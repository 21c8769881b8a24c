"""Options of `mpispeed run`: DeepSpeed's spelling, what they set, what they refuse."""

import json
import os
import shlex
import sys
import tempfile

import pytest
from click.testing import CliRunner

from mpispeed.base.errors import UsageError
from mpispeed.cli import run_options
from mpispeed.cli.deepspeed_options import saved_pid
from mpispeed.cli.main import cli, deepspeed_main, main
from mpispeed.cli.run import _with_signals
from mpispeed.launch.program import runner


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a script and a host file; no SLURM around."""
    for name in ("SLURM_JOB_ID", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("far-a slots=2\nfar-b slots=2\n")
    return tmp_path


def shown(*words):
    """(variables, command line) of a dry run."""
    done = CliRunner().invoke(cli, ["run", "--dry-run", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    parts = shlex.split(done.output)
    first = next(place for place, part in enumerate(parts) if "=" not in part.split("/")[0])
    return dict(part.split("=", 1) for part in parts[:first]), parts[first:]


def refused(capsys, *words):
    """What a start is refused with: one line, exit code 2."""
    with pytest.raises(SystemExit) as leaving:
        main(["run", *words])
    assert leaving.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["-H", "hosts", "-i", "far-b:1", "train.py"],
        ["--hostfile", "hosts", "--include", "far-b:1", "train.py"],
        ["--hostfile=hosts", "--exclude", "far-a@far-b:0", "train.py"],
    ],
)
def test_hosts_are_chosen_as_in_deepspeed(here, words):
    variables, argv = shown(*words)
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert "far-b" in " ".join(argv)
    assert "far-a" not in " ".join(argv)


def test_both_spellings_of_the_counts(here):
    for nodes, gpus in (("--num_nodes", "--num_gpus"), ("--num-nodes", "--num-gpus")):
        _, argv = shown("-H", "hosts", nodes, "1", gpus, "3", "train.py")
        assert argv[argv.index("-n") + 1] == "3"
        assert "far-b" not in " ".join(argv)


def test_ranks_fill_the_hosts(here, capsys):
    _, argv = shown("-H", "hosts", "-n", "3", "train.py")
    assert argv[argv.index("-n") + 1] == "3"
    assert "5 ranks (-n) need as many slots" in refused(capsys, "-H", "hosts", "-n", "5", "train.py")


def test_gpus_of_this_machine(here):
    variables, argv = shown("--include", "localhost:2,3", "train.py")
    assert (variables["CUDA_VISIBLE_DEVICES"], argv[argv.index("-n") + 1]) == ("2,3", "2")
    variables, argv = shown("--num_gpus", "2", "train.py")
    assert ("CUDA_VISIBLE_DEVICES" in variables, argv[argv.index("-n") + 1]) == (False, "2")


def test_variables_of_the_ranks(here):
    words = ["--run-dir", "logs", "--inject", "kill:rank=1@step=5", "--hang-timeout", "30", "--walltime", "0-00:10:00"]
    variables, _ = shown(*words, "--master_addr", "h", "--master_port", "29500", "-H", "hosts", "train.py")
    assert variables["MPISPEED_RUN_DIR"] == str(here / "logs")
    assert variables["MPISPEED_INJECT"] == "kill:rank=1@step=5"
    assert variables["MPISPEED_HANG_TIMEOUT"] == "30"
    assert variables["MPISPEED_WALLTIME"] == "0-00:10:00"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("h", "29500")
    assert variables["MPISPEED_IMPORT_FOLDER"] == str(here)
    assert not (here / "logs").exists()  # a dry run makes nothing
    variables, _ = shown("--enable_each_rank_log", "logs", "train.py")
    assert variables["MPISPEED_RUN_DIR"] == str(here / "logs")
    assert "MPISPEED_IMPORT_FOLDER" not in variables


def test_programs_of_other_kinds(here):
    _, argv = shown("-n", "2", "--no_python", "./a.out", "-x", "1")
    assert argv[-5:] == ["-n", "2", "./a.out", "-x", "1"]
    variables, _ = shown("-H", "hosts", "--no-python", "a.out")
    assert variables["PYTHONPATH"] == str(here)
    _, argv = shown("--module", "pkg.train", "--lr", "1")
    assert argv[-5:] == ["mpispeed.launch.rank", "-m", "pkg.train", "--lr", "1"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--module", "--no_python", "x"], "--module and --no_python exclude each other"),
        (["-H", ".", "train.py"], "the host file . cannot be read"),
        (["-H", "no.hosts", "--num_nodes", "2", "train.py"], "give --hostfile FILE"),
        (["-H", "hosts", "--num_gpus", "1", "--exclude", "far-a", "train.py"], "--num_gpus 1 cannot be combined"),
        (["-H", "hosts", "-i", "far-a", "-e", "far-b", "train.py"], "exclude each other"),
        (["--num_nodes", "2", "train.py"], "give --hostfile FILE"),
        (["--bind", "sockets", "train.py"], "--bind is 'sockets'"),
        (["--bind", "none", "--bind_cores_to_rank", "train.py"], "exclude each other"),
        (["--bind_core_list", "3-1", "train.py"], "does not ascend"),
        (["--run-dir", "train.py", "train.py"], "is a file; name a folder"),
        (["--inject", "kil:rank=1@step=5", "train.py"], "--inject"),
        (["--walltime", "soon", "train.py"], "--walltime: expected seconds"),
        (["--elastic", "--min-nodes", "2", "--max-nodes", "1", "train.py"], "--max-nodes is 1, below --min-nodes 2"),
    ],
)
def test_what_is_refused(here, capsys, words, why):
    error = refused(capsys, *words)
    assert why in error
    assert sum("notice:" not in line for line in error.splitlines()) == 1


@pytest.mark.deepspeed_row("a14")
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-H", "hosts", "--no_ssh", "train.py"], "has to reach far-a, far-b; start inside a SLURM job"),
        (["--autotuning", "run", "train.py"], "give the script its settings with --deepspeed_config FILE.json"),
    ],
)
def test_options_of_deepspeed_that_are_not_served_say_why(here, capsys, words, why):
    assert why in refused(capsys, *words)


@pytest.mark.parametrize(
    ("name", "launcher"), [("OpenMPI", "mpirun"), ("pdsh", "mpirun"), ("SLURM", "srun"), ("auto", "auto")]
)
def test_deepspeeds_launchers(name, launcher):
    assert run_options.launcher_of(None, None, name) == launcher


def test_an_unknown_launcher_is_refused(here):
    done = CliRunner().invoke(cli, ["run", "--launcher", "jsrun", "train.py"])
    assert done.exit_code == 2
    assert "'jsrun' is none of auto, mpirun, srun" in done.output


@pytest.mark.deepspeed_row("a14")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--force_multi"], "--force_multi is not needed"),
        (["--no_local_rank"], "--no_local_rank is not needed"),
        (["--node_rank", "0"], "--node_rank is not needed"),
        (["--deepspeed"], "--deepspeed before the script is not needed"),
        (["--no_ssh"], ""),
        (["--save_pid"], ""),
        (["--hostfile=no.hosts"], "there is no host file no.hosts"),
    ],
)
def test_options_of_deepspeed_that_need_no_effect(here, capsys, words, said):
    _, plain = shown("train.py")
    done = CliRunner().invoke(cli, ["run", "--dry-run", *words, "train.py", "--deepspeed"], catch_exceptions=False)
    assert done.exit_code == 0
    assert shlex.split(done.stdout)[-len(plain) - 1 :] == [*plain, "--deepspeed"]
    assert said in done.stderr
    assert bool(said) == bool(done.stderr)


@pytest.mark.deepspeed_row("a14")
def test_a_port_of_ssh(here):
    variables, argv = shown("-H", "hosts", "--ssh_port", "2222", "train.py")
    assert "-p 2222" in " ".join([*variables.values(), *argv])
    variables, argv = shown("-H", "hosts", "--ssh", "mysh -q", "--ssh_port", "2222", "train.py")
    assert "-q -p 2222" in " ".join([*variables.values(), *argv])


def test_the_word_run_may_be_left_out(here):
    expected = CliRunner().invoke(cli, ["run", "--hostfile=hosts", "--dry-run", "train.py", "--lr", "1"]).stdout
    assert "far-a" in expected
    for words in (
        ["--hostfile=hosts", "--dry-run", "train.py", "--lr", "1"],
        ["-H", "hosts", "--dry-run", "train.py", "--lr", "1"],
    ):
        assert CliRunner().invoke(cli, words).stdout == expected
    assert "Commands" in CliRunner().invoke(cli, ["--help"]).stdout
    assert CliRunner().invoke(cli, ["not_there.py"]).exit_code == 2
    assert CliRunner().invoke(cli, []).exit_code in (0, 2)


def test_an_executable_called_deepspeed(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["deepspeed", "--hostfile=hosts", "--dry-run", "train.py", "--lr", "1"])
    with pytest.raises(SystemExit) as leaving:
        deepspeed_main()
    assert not leaving.value.code
    first = capsys.readouterr().out
    words = ["run", "--torch-env", "--hostfile=hosts", "--dry-run", "train.py", "--lr", "1"]
    assert first == CliRunner().invoke(cli, words).stdout
    with pytest.raises(SystemExit):
        deepspeed_main(["--version"])
    assert capsys.readouterr().out.startswith("mpispeed ")


@pytest.mark.deepspeed_row("a14")
def test_the_pid_is_kept_while_the_job_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"{os.getpid()}.deepspeed"
    with saved_pid(True):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="--save_pid"), saved_pid(True):
        pass
    assert not (tmp_path / "elsewhere").exists()
    with saved_pid(False):
        pass


def test_words_for_the_launcher(here):
    _, argv = shown("--launcher_args", "-prepend-rank -x 'a b'", "train.py")
    place = argv.index("-prepend-rank")
    assert argv[place : place + 3] == ["-prepend-rank", "-x", "a b"]
    assert place < argv.index(sys.executable)
    assert argv[argv.index(sys.executable) + 1 :][: len(runner())] == runner()


SECTION = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3], "min_gpus": 1, "max_gpus": 6,
           "version": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    "words", [["--deepspeed_config", "ds.json"], ["--lr", "1", "--config=ds.json"], ["--deepspeed", "ds.json"]]
)
def test_elastic_starts_take_a_number_of_ranks_that_the_config_allows(here, words):
    (here / "ds.json").write_text(json.dumps({"elasticity": SECTION}))
    counts = run_options.elastic_counts_of(words)
    assert counts == [1, 2, 3, 4, 6]
    (here / "hosts").write_text("far-a slots=3\nfar-b slots=2\n")
    variables, argv = shown("--elastic", "-H", "hosts", "train.py", *words)
    assert argv[argv.index("-n") + 1] == "4"
    assert (variables["MPISPEED_ELASTIC"], variables["MPISPEED_RESTART_COUNT"]) == ("1", "0")


def test_a_config_without_the_section_allows_any_number(here, capsys):
    (here / "ds.json").write_text("{}")
    assert run_options.elastic_counts_of(["--deepspeed_config", "ds.json"]) is None
    assert run_options.elastic_counts_of(["--deepspeed", "--lr", "1"]) is None
    (here / "ds.json").write_text("{")
    assert "ds.json, but that cannot be read" in refused(
        capsys, "--elastic", "train.py", "--deepspeed_config", "ds.json"
    )


def test_an_elastic_job_is_restarted_and_ends(here):
    (here / "train.py").write_text(
        "import os, sys\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"
        "open('left', 'w').write(os.environ['MPISPEED_WALLTIME'])\n"
        "sys.exit(3 if os.environ['MPISPEED_RESTART_COUNT'] == '0' else 0)"
    )
    done = CliRunner().invoke(
        cli, ["run", "--elastic", "--restart-pause", "0.1", "--walltime", "1:00:00", "-n", "2", "train.py"]
    )
    assert done.exit_code == 0, done.output
    assert "restart 1 of 3 on localhost (2)" in done.output
    assert 3500 < int((here / "left").read_text()) < 3600  # of all starts together


def test_the_last_line_says_what_a_signal_means(here):
    (here / "train.py").write_text("import os\nos.kill(os.getpid(), 9)")
    done = CliRunner().invoke(cli, ["run", "-n", "1", "train.py"])
    assert done.exit_code in (9, 137)
    assert "SIGKILL" in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "signals", "told"),
    [
        (0, [2], 0),
        (2, [], 2),
        (2, [2], 130),
        (15, [15], 143),
        (11, [2], 130),
        (11, [], 11),
        (1, [2], 1),
        (130, [2], 130),
        (255, [2], 130),
        (255, [15], 255),
        (255, [], 255),
    ],
)
def test_a_signal_we_passed_on_is_no_code_of_the_program(code, signals, told):
    assert _with_signals(code, signals) == told
