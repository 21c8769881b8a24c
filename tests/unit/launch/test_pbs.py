"""PBS: hosts of a node file, Cray's mpiexec, the time that a job has left, and batch scripts that run for real."""

import json
import os
import re
import socket
import subprocess
import time

import pytest
from click.testing import CliRunner

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.cli import batch
from mpispeed.cli.main import cli, main
from mpispeed.launch import pbs
from mpispeed.launch.hosts import Host
from mpispeed.launch.mpirun import Family, Mpirun, identify
from mpispeed.launch.mpirun_words import mpirun_argv
from mpispeed.launch.options import Wishes, parse_binding
from mpispeed.walltime import job_end
from mpispeed.walltime.job_end import JobEnd
from mpispeed.walltime.pbs_job import ask_pbs, read_left
from tests.helpers.system import CHECKOUT

ANSWER = """Job Id: 12.srv
    Job_Name = gpt
    resources_used.walltime = 00:10:00
    job_state = R
    Variable_List = PBS_O_HOME=/home/me,
\tPBS_O_PATH=/bin
    Resource_List.select = 2:ncpus=4
    Resource_List.walltime = 01:00:00
    stime = {start}

"""


@pytest.fixture
def nodes(tmp_path):
    def write(text):
        (tmp_path / "nodes").write_text(text)
        return {"PBS_JOBID": "12.srv", "PBS_NODEFILE": str(tmp_path / "nodes")}

    return write


def program(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_the_node_file_has_a_line_for_each_process(nodes):
    slots, where = pbs.job_slots(nodes("n1.c\nn1.c\n\nn2.c\nn2.c\n"))
    assert slots == {"n1.c": (0, 1), "n2.c": (0, 1)}
    assert where == "PBS job 12.srv"
    assert pbs.spread(slots, None, where) == (Host("n1.c", (0, 1)), Host("n2.c", (0, 1)))
    assert pbs.spread(slots, 8, where) == (Host("n1.c", (0, 1, 2, 3)), Host("n2.c", (0, 1, 2, 3)))
    assert pbs.spread(slots, 1, where) == (Host("n1.c", (0,)),)
    with pytest.raises(ConfigError, match="5 ranks do not spread evenly over the 2 hosts of PBS job 12"):
        pbs.spread(slots, 5, where)
    assert pbs.spread({"a": (0, 1, 2), "b": (0,)}, 4, "") == (Host("a", (0, 1, 2)), Host("b", (0,)))


def test_what_is_no_job(nodes, tmp_path):
    with pytest.raises(UsageError, match="start inside of a PBS job"):
        pbs.job_slots({"PBS_JOBID": "12"})
    with pytest.raises(ConfigError, match="names no host"):
        pbs.job_slots(nodes("\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        pbs.job_slots({"PBS_JOBID": "12", "PBS_NODEFILE": str(tmp_path / "none")})


@pytest.mark.parametrize("words", [[], ["-n", "2"], ["--launcher", "pbs"], ["--num-nodes", "1"]])
def test_run_takes_the_hosts_of_the_job(nodes, tmp_path, monkeypatch, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "train.py").touch()
    for name, value in nodes("n1\nn1\nn2\nn2\n").items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["run", "--dry-run", *words, str(tmp_path / "train.py")], catch_exceptions=False)
    has_two = "--num-nodes" not in words
    assert ("n2" in done.output.split(" -m ")[0]) is has_two
    assert f"-n {4 if words in ([], ['--launcher', 'pbs']) else 2} " in done.output


# -- Cray's mpiexec ----------------------------------------------------------------------------------------------------


def test_the_mpiexec_of_pals_is_known_by_its_answer_or_its_place(tmp_path):
    assert identify(program(tmp_path, "mpiexec", "echo 'PALS mpiexec 1.2.12'")) == Mpirun(
        tmp_path / "mpiexec", Family.PALS
    )
    assert identify(program(tmp_path, "pals/1.2/bin/mpiexec", "echo mpiexec 1.2")).family is Family.PALS
    assert identify(program(tmp_path, "other/mpiexec", "echo mpiexec 1.2")).family is Family.OTHER


@pytest.mark.parametrize(
    ("binding", "flags"),
    [("mpi", "--cpu-bind none"), ("none", "--cpu-bind none"), ("cores:4", "--cpu-bind depth --depth 4")],
)
def test_flags_of_pals(tmp_path, binding, flags):
    mpirun = Mpirun(tmp_path / "mpiexec", Family.PALS)
    hosts = (Host("n1", (0, 1)), Host("n2", (0, 1)))
    wishes = Wishes(hosts=hosts, binding=parse_binding(binding))
    argv = mpirun_argv(mpirun, 4, ["prog"], cores=0, is_root=False, wishes=wishes)
    assert " ".join(argv[1:]) == f"--hosts n1,n2 --ppn 2 {flags} -n 4 prog"
    uneven = Wishes(hosts=(*hosts, Host("n3", (0,))))
    with pytest.raises(UsageError, match="the same number of slots"):
        mpirun_argv(mpirun, 5, ["prog"], cores=0, is_root=False, wishes=uneven)


# -- time --------------------------------------------------------------------------------------------------------------


def test_time_left_by_the_start_or_by_what_is_used():
    now = time.mktime((2026, 11, 27, 14, 30, 0, 0, 0, -1))
    text = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now - 900))
    assert read_left(ANSWER.format(start=text), now) == 3600 - 900
    assert read_left(ANSWER.format(start="Do 27 Nov 14:15"), now) == 3600 - 600
    without = re.sub(r".*Resource_List.walltime.*\n", "", ANSWER)
    assert read_left(without, now) == float("inf")
    with pytest.raises(ValueError, match="tells of no job"):
        read_left("qstat: Unknown Job Id 12.srv\n", now)


def test_the_end_of_a_job_is_asked_for(tmp_path, monkeypatch):
    program(tmp_path, "qstat", f'[ "$*" = "-f 12.srv" ] && cat <<END\n{ANSWER}\nEND')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(job_end, "process_age_seconds", lambda: 0.0)
    assert ask_pbs("12.srv") == 3000
    end = JobEnd(None, {"PBS_JOBID": "12.srv"}, clock=lambda: 5.0)
    end.ask()
    assert (end.left_seconds, end.source) == (3000, "PBS")
    with pytest.raises(OSError, match="ended with 1"):
        ask_pbs("13.srv")


# -- batch scripts -----------------------------------------------------------------------------------------------------

TRAIN = """
import json, os, sys
from mpi4py import MPI
here = os.environ["MPISPEED_RUN_DIR"]
if MPI.COMM_WORLD.rank == 0:
    with open(os.path.join(here, "told.json"), "w") as file:
        json.dump([MPI.COMM_WORLD.size, sys.argv[1:], os.environ["SITE_SAYS"], os.environ["MPISPEED_JOB_END"]], file)
    with open(os.path.join(here, "state.json"), "w") as file:
        json.dump({"state": sys.argv[1]}, file)
"""


@pytest.mark.parametrize("option", ["--queue", "--account", "--flag"])
def test_what_stands_in_the_head_of_a_script_cannot_become_a_command(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    words = ["qsub", "--cpus-per-task", "1", "--time", "10", "--run-dir", "run", "-o", "job.sh"]
    done = CliRunner().invoke(cli, [*words, option, "x\ntouch evil", "train.py"])
    assert isinstance(done.exception, ConfigError)
    assert "has a line break" in str(done.exception)
    words[words.index("run")] = "at 12:00"
    assert "takes no spaces, commas or colons" in str(CliRunner().invoke(cli, [*words, "train.py"]).exception)
    assert not (tmp_path / "job.sh").exists()


def script_of(folder, *words):
    """The script that `mpispeed qsub` writes for a run on 2 ranks."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "ds.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "walltime": {"enabled": True, "save_dir": "ck", "chain": "requeue"},
    }))  # fmt: skip
    options = ["--ntasks-per-node", "2", "--cpus-per-task", "1", "--time", "10", "--run-dir", "run", "-o", "job.sh"]
    done = CliRunner().invoke(
        cli, ["qsub", *options, "--config", "ds.json", "train.py", *words], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return folder / "job.sh"


@pytest.mark.parametrize(("state", "next_jobs"), [("interrupted", 1), ("finished", 0)])
def test_a_script_starts_ranks_and_submits_itself_again(tmp_path, monkeypatch, nodes, state, next_jobs):
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site.toml"
    site.write_text('[environment]\nSITE_SAYS = "two words"\n')
    site.chmod(0o644)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("MPISPEED_SITE_FILE", str(site))
    script = script_of(tmp_path, state, "a b")
    program(tmp_path, "bin/qsub", 'echo "$*" >> "$QSUB_LOG"; echo 13.srv')
    here = socket.gethostname()
    environ = {
        **os.environ, **nodes(f"{here}\n{here}\n"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "QSUB_LOG": str(tmp_path / "submitted"), "PYTHONPATH": CHECKOUT, "MPISPEED_SITE_FILE": "",
    }  # fmt: skip
    environ.pop("SLURM_JOB_ID", None)
    before = int(time.time())
    done = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    size, words, said, end = json.loads((tmp_path / "run" / "told.json").read_text())
    assert (size, words, said) == (2, [state, "a b", "--deepspeed_config", "ds.json"], "two words")
    assert 590 <= int(end) - before <= 660
    submitted = tmp_path / "submitted"
    lines = submitted.read_text().splitlines() if submitted.exists() else []
    assert lines == [str(tmp_path / "run" / "job.pbs")] * next_jobs
    assert (tmp_path / "run" / "job.pbs").read_text() == script.read_text()


def test_a_stop_file_starts_nothing(tmp_path, monkeypatch, nodes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPISPEED_SITE_FILE", "")
    script = script_of(tmp_path, "finished")
    (tmp_path / "run" / "STOP").touch()
    done = subprocess.run(
        ["bash", str(script)], env={**os.environ, **nodes("n1\n")}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "STOP is there" in done.stderr) == (0, True)
    assert not (tmp_path / "run" / "told.json").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--time", "10"], "how many cores has a rank"),
        (["--cpus-per-task", "1"], "how long may the job run"),
        (["--cpus-per-task", "1", "--time", "soon"], "--time is 'soon'"),
        (["--cpus-per-task", "1", "--time", "0"], "no time at all"),
        (["--cpus-per-task", "1", "--time", "5", "--job-name", "1st"], "takes a letter"),
        (["--cpus-per-task", "1", "--time", "5", "--run-dir", "a b"], "no spaces"),
        (["--cpus-per-task", "1", "--time", "5"], "qsub cannot be called here"),
    ],
)
def test_what_cannot_be_submitted(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPISPEED_SITE_FILE", "")
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as leaving:
        main(["qsub", *words, "train.py"])
    assert leaving.value.code == 2
    assert told in capsys.readouterr().err


def test_two_jobs_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    program(tmp_path, "bin/qsub", "echo 13.srv")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(batch.time, "strftime", lambda form: "20270101-000000")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for _ in range(2):
        done = CliRunner().invoke(cli, ["qsub", "--cpus-per-task", "1", "--time", "5", "train.py"])
        assert done.exit_code == 0, done.output
    assert sorted(path.parent.name[-2:] for path in (tmp_path / "runs").glob("train-*/job.pbs")) == ["-2", "00"]


def test_a_refusal_in_another_encoding_is_told(tmp_path, monkeypatch, capsys):
    program(tmp_path, "bin/qsub", r"printf 'qsub: d\xe9sol\xe9, queue\n' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit):
        main(["qsub", "--cpus-per-task", "1", "--time", "5", "--run-dir", "run", "train.py"])
    assert "job.pbs: qsub: d\N{REPLACEMENT CHARACTER}sol" in capsys.readouterr().err


def test_a_chain_by_dependency_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "walltime": {"enabled": true, "save_dir": "ck"}}'
    )
    with pytest.raises(SystemExit):
        main(["qsub", "--cpus-per-task", "1", "--time", "5", "--config", "ds.json", "train.py"])
    assert 'set it to "requeue"' in capsys.readouterr().err
