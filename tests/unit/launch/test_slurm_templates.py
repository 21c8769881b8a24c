"""The batch templates: filled, they are shell scripts that reach the training through srun and check the world."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time

import pytest

from mpispeed.base import assets
from mpispeed.launch import sbatch

TEMPLATES = sorted((assets.folder("slurm") / "templates").glob("*.sbatch"))
THROUGH_SRUN = [path for path in TEMPLATES if path.stem != "tune"]
# An srun that runs its command so many times, and an apptainer that leaves out what is before the image.
FAKE_SRUN = """#!/bin/bash
while [ $# -gt 0 ] && [[ "$1" == --* ]]; do echo "flag $1" >> "$SRUN_LOG"; shift; done
for _ in $(seq "${SRUN_TASKS:-1}"); do "$@"; done
"""


FAKE_APPTAINER = """#!/bin/bash
while [ "$1" != gpt.sif ]; do shift; done
shift
exec "$@"
"""
VALUES = {
    "job_name": "gpt", "time_limit": "00:10:00", "nodes": "2", "ranks_per_node": "3", "cores_per_rank": "4",
    "array": "0-3", "directives": "#SBATCH --partition=main", "mpi_plugin": "pmi2", "srun_flags": " --label",
    "setup": "export SITE=ready$NO_SUCH_VARIABLE", "arguments": "train.py --deepspeed_config ds.json --steps 3",
    "forward": ":", "environment": "", "image": "gpt.sif", "container_command": "apptainer", "container_flags": " --nv",
}  # fmt: skip


def values(folder, **changes):
    places = {
        "work_folder": shlex.quote(str(folder)), "run_folder": shlex.quote(str(folder / "run")), "log_folder": "/logs",
        "python": shlex.quote(str(folder / "python")),
    }  # fmt: skip
    return {**VALUES, **places, **changes}


def fill(template, folder, **changes):
    return sbatch.fill(template.stem, values(folder, **changes))


def prepare(template, folder, world, state="RUNNING", **changes):
    """The filled script and its environment, with an srun that runs its command once, and a python that reports its
    world; SLURM says that the job is in that state."""
    for name, text in (
        ("srun", FAKE_SRUN),
        ("apptainer", FAKE_APPTAINER),
        ("squeue", f'#!/bin/bash\ncase "$*" in *%T*) echo {state} ;; *) echo 9:59 2026-01-02T03:04:05 ;; esac\n'),
        ("scontrol", '#!/bin/bash\necho "scontrol $*"\n'),
        ("python", f'#!/bin/bash\nif [ "$1" = -c ]; then echo {world}; else echo "ran $* SITE=$SITE"; fi\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = folder / "job.sbatch"
    job.write_text(fill(template, folder, **changes))
    slurm = {
        "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "5",
        "SRUN_LOG": str(folder / "log"),
    }  # fmt: skip
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return job, {**os.environ, **slurm, "PATH": path}


def start(template, folder, world, **changes):
    """Run the filled script to its end."""
    job, environ = prepare(template, folder, world, **changes)
    return subprocess.run(["bash", job], env=environ, capture_output=True, text=True, check=False)


def in_front_of(template, folder):
    """What starts the script in this template."""
    others = {"torch": f"-m mpispeed env -- {folder}/python", **dict.fromkeys(sbatch.COMMANDS, "-m mpispeed")}
    return others.get(template.stem, "-m mpi4py")


def named(stem):
    return next(path for path in TEMPLATES if path.stem == stem)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_shell_accepts_the_filled_template(template, tmp_path):
    job = tmp_path / "job.sbatch"
    job.write_text(fill(template, tmp_path))
    subprocess.run(["bash", "-n", job], check=True)
    if shutil.which("shellcheck") or os.environ.get("CI") == "true":
        # What is set for parts that this template does not use, and files of modules, which are not here.
        done = subprocess.run(
            ["shellcheck", "--severity=info", "--exclude=SC2034,SC1090,SC1091,SC2154", job],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    assert re.findall(r"^#SBATCH --(?:job-name|time)=(\S+)", job.read_text(), re.MULTILINE) == ["gpt", "00:10:00"]


@pytest.mark.parametrize("template", THROUGH_SRUN, ids=lambda path: path.stem)
def test_starts_the_script_through_srun(template, tmp_path):
    done = start(template, tmp_path, world=6)
    assert done.returncode == 0, done.stderr
    words = in_front_of(template, tmp_path)
    assert done.stdout.strip() == f"ran {words} train.py --deepspeed_config ds.json --steps 3 SITE=ready"
    task = "task-5" if template.stem == "array" else ""
    assert (tmp_path / "run" / task / "job.sbatch").exists()
    flags = (tmp_path / "log").read_text()
    assert "flag --mpi=pmi2" in flags
    assert "flag --export=ALL" in flags
    assert "flag --cpus-per-task=4" in flags
    assert "flag --ntasks-per-node=3" in flags
    assert "flag --label" in flags


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_quoted_values_reach_the_script_unchanged(template, tmp_path):
    folder = tmp_path / 'my "run" $(touch hurt)'
    folder.mkdir()
    done = start(template, folder, world=6, arguments=shlex.join(["a b.py", "--name", "$HOME 'x'"]))
    assert done.returncode == 0, done.stderr
    assert f"{in_front_of(template, folder)} a b.py --name $HOME 'x' SITE" in done.stdout
    assert not list(tmp_path.rglob("hurt"))


def test_refuses_worlds_of_one(tmp_path):
    multi = next(path for path in TEMPLATES if path.stem == "multi")
    done = start(multi, tmp_path, world=1)
    assert done.returncode == 1
    assert "a world of 1 instead of 6 ranks" in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.parametrize("stem", ["requeue", "container"])
@pytest.mark.parametrize(
    ("state", "is_requeued"),
    [
        ('{\n "state": "interrupted",\n "next_job": ""\n}', True),
        ('{"state":"interrupted"}', True),
        ('{\n "state": "interrupted",\n "next_job": "8"\n}', False),
        ('{"state": "finished"}', False),
        ('{"state": "stopped"}', False),
        ("", False),
    ],
)
def test_only_an_interrupted_run_is_requeued(stem, state, is_requeued, tmp_path):
    template = next(path for path in TEMPLATES if path.stem == stem)
    # Times of files are those of the kernel's clock, which ticks each 10 ms at worst; a real run takes longer.
    says = f"sleep 0.02; printf %s {shlex.quote(state)} > {tmp_path}/run/state.json"
    done = start(template, tmp_path, world=6, python=shlex.join(["bash", "-c", says]))
    assert done.returncode == 0, done.stderr
    assert ("scontrol requeue 7" in done.stdout) is is_requeued


def test_cancelled_job_is_not_requeued(tmp_path):
    says = f"""sleep 0.02; printf '{{"state": "interrupted"}}' > {tmp_path}/run/state.json"""
    done = start(named("requeue"), tmp_path, 6, state="COMPLETING", python=shlex.join(["bash", "-c", says]))
    assert done.returncode == 0
    assert "scontrol" not in done.stdout
    assert f"it is not requeued\nto go on: sbatch {tmp_path}/run/job.sbatch" in done.stderr


def test_ranks_in_containers_know_the_end_of_the_job(tmp_path):
    shows = shlex.join(["bash", "-c", 'echo "$MPISPEED_WALLTIME $MPISPEED_JOB_END"'])
    done = start(named("container"), tmp_path, 6, python=shows)
    ends = int(time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1)))
    assert done.stdout == f"9:59 {ends}\n", done.stderr


@pytest.mark.parametrize(
    ("number", "forward", "got"),
    [(signal.SIGUSR1, ":", True), (signal.SIGTERM, "pass_on", True), (signal.SIGTERM, ":", False)],
)
def test_batch_shell_outlives_signals_and_passes_on_what_ranks_expect(tmp_path, number, forward, got):
    waits = "for _ in {1..600}; do [ ! -e told ] || break; sleep 0.1; done"
    ranks = f'trap "echo got; exit 0" USR1; touch up; {waits}; echo end'
    job, environ = prepare(named("single"), tmp_path, 6, forward=forward, python=shlex.join(["bash", "-c", ranks]))
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n')
    with subprocess.Popen(["bash", job], env=environ, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        time.sleep(0.1)
        process.send_signal(number)
        if not got:
            time.sleep(0.3)  # it would come meanwhile
            (tmp_path / "told").touch()
        output = process.communicate(timeout=120)[0]
    assert (output, process.returncode) == ("got\n" if got else "end\n", 0)


def test_signal_before_the_ranks_does_not_end_the_job(tmp_path):
    done = start(named("single"), tmp_path, 6, setup="kill -USR1 $$")
    assert (done.returncode, "ran" in done.stdout) == (0, True), done.stderr


def test_state_of_an_earlier_job_does_not_requeue(tmp_path):
    template = next(path for path in TEMPLATES if path.stem == "requeue")
    (tmp_path / "run").mkdir()
    old = tmp_path / "run" / "state.json"
    old.write_text('{"state": "interrupted"}')
    os.utime(old, (1, 1))
    assert "scontrol" not in start(template, tmp_path, world=6).stdout


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_job_ends_as_the_ranks_do(template, tmp_path):
    done = start(template, tmp_path, world=6, python=shlex.join(["bash", "-c", "echo 6; [[ $1 != mpi* ]] || exit 3"]))
    assert done.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_tuner_starts_ranks_itself_and_is_ended_before_the_limit(tmp_path, number):
    words = f"trap 'exit 7' TERM; echo \"$* $SLURM_MPI_TYPE\" > {tmp_path}/told; while :; do sleep 0.02; done"
    job, environ = prepare(named("tune"), tmp_path, world=6, python=shlex.join(["bash", "-c", words]))
    process = subprocess.Popen(["bash", job], env=environ)
    while not (tmp_path / "told").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(300) == 7
    assert (tmp_path / "told").read_text() == "mpispeed train.py --deepspeed_config ds.json --steps 3 pmi2\n"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("command", "state", "number", "is_requeued"),
    [
        ("build", "RUNNING", signal.SIGUSR1, True), ("import", "RUNNING", signal.SIGUSR1, True),
        ("merge", "RUNNING", signal.SIGUSR1, False), ("build", "COMPLETING", signal.SIGUSR1, False),
        ("build", "RUNNING", None, False),
    ],
)  # fmt: skip
def test_only_a_build_that_the_time_limit_ends_is_requeued(tmp_path, command, state, number, is_requeued):
    ranks = f'echo "$*" > {tmp_path}/up; while [ ! -e {tmp_path}/fail ]; do sleep 0.02; done; exit 3'
    words = {"arguments": f"data {command} -o a.h5", "python": shlex.join(["bash", "-c", ranks])}
    job, environ = prepare(named("data"), tmp_path, 6, state=state, **words)
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n')
    with subprocess.Popen(["bash", job], env=environ, stdout=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "up").exists():
            time.sleep(0.02)
        time.sleep(0.1)
        (tmp_path / "fail").touch() if number is None else process.send_signal(number)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == (3 if number is None else 128 + signal.SIGTERM)
    assert ("scontrol requeue 7" in output) is is_requeued
    assert (tmp_path / "up").read_text() == f"mpispeed data {command} -o a.h5\n"


def test_readme_names_every_value():
    readme = (assets.folder("slurm") / "README.md").read_text()
    parts = sorted((assets.folder("slurm") / "parts").glob("*.sh"))
    assert parts
    for template in [*TEMPLATES, *parts]:
        names = set(re.findall(r"(?<!\$)\$([a-z_]+)", re.sub(r"\$\$", "", template.read_text())))
        missing = sorted(name for name in names if f"`{name}`" not in readme)
        assert not missing, f"{template.name} uses {missing}, slurm/README.md does not explain them"
