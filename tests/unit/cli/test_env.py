"""`mpispeed env` and `mpispeed run --torch-env`: lines for a shell, the program they start, what is refused."""

import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mpispeed.base.launched import RANKS, SIZES
from mpispeed.cli.main import cli, main
from mpispeed.cli.run_options import wrapper_flags

ENV = [sys.executable, "-m", "mpispeed", "env"]
RANK = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SHOW = "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')))"


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """No launcher around, a script, and a host file."""
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NTASKS")
    for name in (*SIZES, *RANKS.values(), *slurm, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("far-a slots=2\nfar-b slots=1\n")
    return monkeypatch


def planned(*words):
    done = CliRunner().invoke(cli, ["run", "--dry-run", "--torch-env", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return shlex.split(done.output)


def test_lines_for_a_shell(alone):
    alone.setenv("MASTER_ADDR", "a b")
    alone.setenv("MASTER_PORT", "7")
    done = CliRunner().invoke(cli, ["env"], catch_exceptions=False)
    assert done.stdout.splitlines() == [
        "export RANK=0", "export WORLD_SIZE=1", "export LOCAL_RANK=0", "export LOCAL_WORLD_SIZE=1",
        "export MASTER_ADDR='a b'", "export MASTER_PORT=7", "export NODE_RANK=0",
    ]  # fmt: skip


def test_program_takes_its_place(alone):
    for name, value in RANK.items():
        alone.setenv(name, value)
    for words in (["--", sys.executable, "-c", SHOW], [sys.executable, "-c", f"{SHOW}; raise SystemExit(5)"]):
        done = subprocess.run([*ENV, *words], capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == ("1 2 1 127.0.0.1\n", 5 if "Exit" in words[-1] else 0), done.stderr


@pytest.mark.parametrize(
    ("program", "cure"),
    [("no-such-program", "No such file or directory; give its path"), ("./train.py", "give python ./train.py")],
)
def test_program_that_cannot_be_started(alone, capsys, program, cure):
    with pytest.raises(SystemExit) as leaving:
        main(["env", "--", program])
    assert leaving.value.code == 2
    assert cure in capsys.readouterr().err


def test_rank_0_alone_says_what_is_missing(alone, capsys):
    for name, value in {**RANK, "MPI_LOCALNRANKS": "1", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}.items():
        alone.setenv(name, value)
    for rank in ("0", "1"):
        alone.setenv("PMI_RANK", rank)
        with pytest.raises(SystemExit) as leaving:
            main(["env"])
        assert leaving.value.code == 2
        assert ("set MASTER_ADDR" in capsys.readouterr().err) is (rank == "0")


def test_contradictions_are_named(alone):
    alone.setenv("WORLD_SIZE", "9")
    done = CliRunner().invoke(cli, ["env"], catch_exceptions=False)
    assert "WORLD_SIZE=9 in the environment" in done.stderr
    assert "export WORLD_SIZE=1\n" in done.stdout


def test_run_passes_it_to_the_runner_or_wraps_the_program(alone):
    words = planned("-n", "2", "train.py", "--torch-env")
    assert words[-4:] == ["mpispeed.launch.rank", "--torch-env", "train.py", "--torch-env"]
    assert planned("-m", "pkg.train")[-3:] == ["--torch-env", "-m", "pkg.train"]
    words = planned("--no-python", "prog", "x")
    assert words[-7:] == [sys.executable, *wrapper_flags(), "env", "--", "prog", "x"][-7:]
    assert wrapper_flags((3, 10)) == ["-c", "import sys; del sys.path[0]; from mpispeed.cli.main import main; main()"]


def test_run_tells_the_hosts_that_it_knows(alone):
    words = planned("-H", "hosts", "train.py")
    assert {"MASTER_ADDR=far-a", "MPISPEED_HOST_RANKS=2,1"} <= set(words)
    assert any(word.startswith("MASTER_PORT=") for word in words)
    words = planned("-H", "hosts", "--master_addr", "ib-a", "--master_port", "5", "train.py")
    assert {"MASTER_ADDR=ib-a", "MASTER_PORT=5"} <= set(words)
    assert not [word for word in planned("-n", "2", "train.py") if word.startswith(("MASTER", "MPISPEED_HOST"))]
