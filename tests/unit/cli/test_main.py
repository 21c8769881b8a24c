"""The command: a fast start without torch, pass-through of the script's options, exit codes."""

import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

import mpispeed
from mpispeed.cli.main import COMMANDS, LazyGroup, cli
from mpispeed.launch.program import runner

HEAVY = ("torch", "numpy", "pydantic", "h5py", "mpi4py", "rich")


def call(*words, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "mpispeed.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_start_imports_nothing_heavy():
    modules = "mpispeed.cli.main, mpispeed.cli.run, mpispeed.launch, mpispeed.watchdog.report"
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(HEAVY) & set(done.stdout.split())


def test_help_lists_every_command():
    done = CliRunner().invoke(cli, ["--help"])
    assert done.exit_code == 0
    for name, (_, _, text) in COMMANDS.items():
        assert name in done.output
        assert text.split()[0] in done.output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_can_be_imported_and_explains_itself(name):
    assert isinstance(cli, LazyGroup)
    done = CliRunner().invoke(cli, [name, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output


def test_unknown_command_is_refused():
    done = CliRunner().invoke(cli, ["rnu"])
    assert done.exit_code == 2
    assert "rnu" in done.output


def test_version_is_that_of_the_package():
    assert call("--version").stdout.strip() == f"mpispeed {mpispeed.__version__}"


def test_missing_script_is_one_line_and_exit_code_2():
    done = call("run", "-n", "2", "no/such.py", "--lr", "1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "there is no script no/such.py" in done.stderr


def test_dry_run_passes_the_scripts_options_through(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)")
    done = call("run", "-n", "3", "--dry-run", "--debug", str(script), "--lr", "3", "-n", "5", "--dry-run")
    assert done.returncode == 0
    assert done.stdout.endswith(
        f"-n 3 {shlex.join([sys.executable, *runner()])} -m mpispeed.launch.rank {script} --lr 3 -n 5 --dry-run\n"
    )
    assert "MPISPEED_DEBUG=1" in done.stdout


def test_runs_ranks_and_returns_the_code_of_the_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nfrom mpi4py import MPI\n"
        "line = f'{MPI.COMM_WORLD.allreduce(1)} {sys.argv[1]} {sys.argv[2]}\\n'\n"
        "os.write(1, line.encode())\nsys.exit(int(sys.argv[2]))"
    )
    done = call("run", "-n", "2", str(script), "--code", "0")
    assert sorted(done.stdout.split("\n")) == ["", "2 --code 0", "2 --code 0"]
    assert done.returncode == 0
    assert call("run", "-n", "2", str(script), "--code", "6").returncode == 6


def test_a_rank_that_fails_ends_the_others(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    raise ValueError('broken')\nMPI.COMM_WORLD.Barrier()"
    )
    done = call("run", "-n", "2", str(script))
    assert done.returncode != 0
    assert "ValueError: broken" in done.stderr


def test_a_rank_that_fails_before_it_joins_ends_the_others(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nif os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "    import no_such_module\nfrom mpispeed.mesh import start\nstart().comm.barrier()\n"
    )
    done = call("run", "-n", "2", str(script))
    assert done.returncode not in (0, 2)
    assert done.stderr.count("No module named 'no_such_module'") == 1


def test_script_finds_its_neighbours_and_a_module_its_package(tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'found'")
    script = tmp_path / "train.py"
    script.write_text("import os, sys, neighbour\nos.write(1, f'{neighbour.WORD} {sys.argv}'.encode())")
    assert call("run", str(script), "-m", "x").stdout == f"found {[str(script), '-m', 'x']}"
    assert call("run", "-m", "this").stdout.startswith("The Zen of Python")


@pytest.mark.parametrize("version", [(3, 10), sys.version_info[:2]])
def test_files_beside_the_user_do_not_replace_mpi4py(tmp_path, version):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neighbour.py").write_text(f"WORD = {folder!r}")
    for name in ("mpi4py", "mpispeed", "runpy"):
        (tmp_path / "here" / f"{name}.py").write_text("raise SystemExit(77)")
    script = tmp_path / "there" / "train.py"
    script.write_text("import sys, neighbour\nprint(neighbour.WORD, sys.argv[1:])")
    for words, answer in (((script, "x"), "there ['x']"), (("-m", "neighbour"), "")):
        argv = [sys.executable, *runner(version), "-m", "mpispeed.launch.rank", *words]
        done = subprocess.run(argv, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, answer), done.stderr
