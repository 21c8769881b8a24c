"""Launch command lines: the launcher that is found, its flags and variables, what becomes of codes and signals."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch import Launch, command, plan_launch, run_launch
from mpispeed.launch.env import rank_environment
from mpispeed.launch.mpirun import Family, Mpirun, find_mpirun, identify, mpi_choice
from mpispeed.launch.mpirun_words import mpirun_argv
from mpispeed.launch.srun import is_inside_allocation, srun_argv

VERSIONS = {
    Family.OPEN_MPI: "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/",
    Family.INTEL: "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101 (id: 0)",
    Family.MPICH: "HYDRA build details:\n    Version:                                 4.0.2",
    Family.PALS: "PALS mpiexec 1.2.12",
    Family.OTHER: "something else 1.0",
}


def fake_launcher(folder, family, name="mpirun"):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{VERSIONS[family]}\nEOF\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def site(tmp_path):
    """A folder with a python, and one on PATH; tools of the system stay reachable."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").touch()
    return tmp_path / "venv" / "python", tmp_path / "bin", {"PATH": f"{tmp_path / 'bin'}"}


@pytest.mark.parametrize("family", list(Family))
def test_identifies_the_family_by_its_version(family, tmp_path):
    assert identify(fake_launcher(tmp_path, family)).family is family


def test_a_launcher_beside_python_wins_unless_the_site_is_asked_for(site):
    python, folder, environ = site
    wheel = fake_launcher(python.parent, Family.MPICH)
    of_site = fake_launcher(folder, Family.OPEN_MPI)
    environ["PATH"] += os.pathsep + str(python.parent)
    assert find_mpirun(environ=environ, python=str(python)) == Mpirun(wheel, Family.MPICH)
    assert find_mpirun("site", environ=environ, python=str(python)) == Mpirun(of_site, Family.OPEN_MPI)


def test_mpiexec_is_taken_where_there_is_no_mpirun(site):
    python, folder, environ = site
    path = fake_launcher(folder, Family.INTEL, "mpiexec")
    assert find_mpirun(environ=environ, python=str(python)) == Mpirun(path, Family.INTEL)


def test_intels_program_is_taken_in_place_of_its_script(site):
    python, folder, environ = site
    script = fake_launcher(folder, Family.INTEL)
    program = fake_launcher(folder, Family.INTEL, "mpiexec.hydra")
    assert find_mpirun(environ=environ, python=str(python)).path == program
    assert find_mpirun(environ={**environ, "PE_HOSTFILE": "x"}, python=str(python)).path == script
    (folder.parent / "env").mkdir()
    (folder.parent / "env" / "vars.sh").touch()
    assert find_mpirun(environ=environ, python=str(python)).path == script
    assert find_mpirun(environ={**environ, "I_MPI_ROOT": "x"}, python=str(python)).path == program


@pytest.mark.parametrize(("mpi", "cure"), [("auto", "mpispeed[mpich]"), ("site", "MPI module")])
def test_no_launcher_is_an_error_with_a_cure(site, mpi, cure):
    python, _, environ = site
    with pytest.raises(UsageError, match="no mpirun") as error:
        find_mpirun(mpi, environ=environ, python=str(python))
    assert cure in str(error.value)


def test_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="not 'mine'"):
        find_mpirun("mine")


@pytest.mark.parametrize(
    ("family", "ranks", "is_root", "flags"),
    [
        (Family.MPICH, 8, True, []),
        (Family.INTEL, 8, True, []),
        (Family.OPEN_MPI, 2, False, []),
        (Family.OPEN_MPI, 2, True, ["--allow-run-as-root"]),
        (Family.OPEN_MPI, 3, False, ["--oversubscribe", "--bind-to", "none"]),
    ],
)
def test_flags_of_each_family(family, ranks, is_root, flags):
    argv = mpirun_argv(Mpirun(Path("/x/mpirun"), family), ranks, ["python", "a.py"], cores=2, is_root=is_root)
    assert argv == ["/x/mpirun", *flags, "-n", str(ranks), "python", "a.py"]


def test_mpi4py_is_told_the_family_when_a_wheel_would_win(site):
    python, folder, _ = site
    of_site = Mpirun(fake_launcher(folder, Family.OPEN_MPI), Family.OPEN_MPI)
    assert mpi_choice(of_site, python=str(python)) == {}
    wheel = Mpirun(fake_launcher(python.parent, Family.MPICH), Family.MPICH)
    assert mpi_choice(of_site, python=str(python)) == {"MPI4PY_MPIABI": "openmpi"}
    assert mpi_choice(wheel, python=str(python)) == {}


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(1, 8, "8"), (3, 8, "2"), (8, 8, "1")])
def test_ranks_share_the_cores(ranks, cores, threads):
    added = rank_environment({}, ranks_per_node=ranks, cores=cores)
    assert added == {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def test_too_many_ranks_yield_early_and_the_users_settings_stay():
    added = rank_environment({"OMP_NUM_THREADS": "5"}, ranks_per_node=4, cores=2, is_debug=True)
    assert added == {
        "PYTHONUNBUFFERED": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "I_MPI_THREAD_YIELD": "3", "MPISPEED_DEBUG": "1",
    }  # fmt: skip


SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("family", "extra", "plugin"),
    [
        (Family.MPICH, {}, ["--mpi=pmi2"]),
        (Family.INTEL, {}, ["--mpi=pmi2"]),
        (Family.OPEN_MPI, {}, ["--mpi=pmix"]),
        (None, {}, []),
        (Family.MPICH, {"SLURM_MPI_TYPE": "cray_shasta"}, []),
    ],
)
def test_srun_uses_the_plugin_of_the_family(family, extra, plugin):
    argv = srun_argv(8, ["p"], family, {**SLURM, **extra})
    assert argv == [
        "srun", "--kill-on-bad-exit=1", "--export=ALL", *plugin, "--nodes=2", "--ntasks-per-node=4", "--ntasks=8", "p",
    ]  # fmt: skip


def test_srun_passes_cores_on_and_refuses_an_uneven_spread():
    assert "--cpus-per-task=6" in srun_argv(2, ["p"], None, {**SLURM, "SLURM_CPUS_PER_TASK": "6"})
    with pytest.raises(UsageError, match="3 ranks do not spread evenly over the 2 nodes of job 7"):
        srun_argv(3, ["p"], None, SLURM)


def test_a_step_is_not_an_allocation_but_the_batch_shell_is(tmp_path):
    environ = {**SLURM, "PATH": str(tmp_path)}
    assert not is_inside_allocation(environ)
    fake_launcher(tmp_path, Family.OTHER, "srun")
    assert is_inside_allocation(environ)
    assert is_inside_allocation({**environ, "SLURM_STEP_ID": "4294967291"})
    assert not is_inside_allocation({**environ, "SLURM_STEP_ID": "0"})
    assert not is_inside_allocation({"PATH": str(tmp_path)})


def test_plan_inside_an_allocation_takes_its_tasks(tmp_path):
    fake_launcher(tmp_path, Family.OTHER, "srun")
    launch = plan_launch(["p"], environ={**SLURM, "PATH": str(tmp_path), "SLURM_CPUS_ON_NODE": "16"})
    assert launch.argv[0] == "srun"
    assert "--ntasks=8" in launch.argv
    assert launch.added["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("ranks", "slurm", "threads"),
    [
        (None, {"SLURM_CPUS_PER_TASK": "3", "SLURM_CPUS_ON_NODE": "16"}, 3),
        (None, {"SLURM_CPUS_ON_NODE": "16"}, 4),
        (4, {"SLURM_CPUS_ON_NODE": "16"}, 8),
        (1, {"SLURM_CPUS_PER_TASK": "6", "SLURM_CPUS_ON_NODE": "16"}, 6),
        (16, {"SLURM_CPUS_ON_NODE": "4"}, 1),
    ],
)
def test_threads_of_a_slurm_rank_are_the_cores_srun_gives_it(tmp_path, ranks, slurm, threads):
    fake_launcher(tmp_path, Family.OTHER, "srun")
    launch = plan_launch(["p"], ranks, environ={**SLURM, **slurm, "PATH": str(tmp_path)})
    assert launch.added["OMP_NUM_THREADS"] == str(threads)
    assert f"--cpus-per-task={threads}" in launch.argv


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK"])
@pytest.mark.parametrize("text", ["", "two", "0", "-1"])
def test_a_bad_slurm_variable_is_named(tmp_path, name, text):
    fake_launcher(tmp_path, Family.OTHER, "srun")
    with pytest.raises(UsageError, match=f"{name} is '{text}'"):
        plan_launch(["p"], environ={**SLURM, "PATH": str(tmp_path), name: text})


def test_plan_outside_is_one_rank_by_default(site, monkeypatch):
    _, folder, environ = site
    fake_launcher(folder, Family.MPICH)
    monkeypatch.setattr(command.env, "usable_cores", lambda: 4)
    launch = plan_launch(["p", "a b"], mpi="site", environ=environ)
    assert launch.argv == (str(folder / "mpirun"), "-n", "1", "p", "a b")
    assert launch.describe().endswith("mpirun -n 1 p 'a b'")
    assert "OMP_NUM_THREADS=4" in launch.describe()
    with pytest.raises(ConfigError, match="ranks is 0"):
        plan_launch(["p"], 0, environ=environ)


@pytest.mark.parametrize("code", [0, 7])
def test_exit_code_is_that_of_the_job(code):
    assert run_launch(Launch((sys.executable, "-c", f"raise SystemExit({code})"))) == code


def test_a_fatal_signal_becomes_128_plus_its_number():
    assert run_launch(Launch((sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))) == 128 + 9


def test_variables_reach_the_job():
    code = "import os, sys; sys.exit(os.environ['MPISPEED_PROBE'] != 'x')"
    assert run_launch(Launch((sys.executable, "-c", code), {"MPISPEED_PROBE": "x"})) == 0


@pytest.fixture
def parent():
    """A launcher whose child answers every signal it is sent with exit code 5, and has told its number."""
    code = textwrap.dedent("""
        import signal, sys
        from mpispeed.launch import Launch, run_launch
        for number in (1, 2, 3, 10, 12, 15):  # a run in the background begins with some of them ignored
            signal.signal(number, signal.SIG_DFL)
        child = "import os, signal, sys, time\\nfor number in (1, 2, 3, 10, 12, 15):\\n" \\
                "    signal.signal(number, lambda *_: sys.exit(5))\\nprint(os.getpid(), flush=True)\\n" \\
                "while True:\\n    time.sleep(0.05)"  # not pause(): a signal just before it would not end it
        sys.exit(run_launch(Launch((sys.executable, "-c", child))))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True
    )
    child = int(process.stdout.readline())
    yield process, child
    process.kill()
    process.wait(20)
    process.stdout.close()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signals_are_passed_on(parent, name):
    process, _ = parent
    process.send_signal(getattr(signal, name))
    assert process.wait(20) == 5


def test_the_job_ends_with_a_launcher_that_is_killed(parent):
    process, child = parent
    process.kill()
    try:
        readable, _, _ = select.select([process.stdout], [], [], 20)
        assert readable, "the job outlived its launcher"
        assert process.stdout.read() == b""  # nobody is left to write
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_signal_that_comes_while_the_job_is_started_reaches_it(monkeypatch, name):
    """Before anybody could pass it on; it neither ends the launcher nor is lost."""
    number, lost = getattr(signal, name), []

    class Started(subprocess.Popen):
        def __init__(self, *words, **settings):
            super().__init__(*words, **settings)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(command.subprocess, "Popen", Started)
    before = signal.signal(number, lambda *_: lost.append(number))
    try:
        assert run_launch(Launch(("sleep", "60"))) == 128 + number
    finally:
        signal.signal(number, before)
    assert lost == []


def test_no_signal_is_held_back_once_the_job_is_started():
    code = "import signal, sys; sys.exit(bool(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    assert run_launch(Launch((sys.executable, "-c", code))) == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
        assert run_launch(Launch((sys.executable, "-c", code))) == 0
        code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)"
        assert run_launch(Launch((sys.executable, "-c", code))) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
