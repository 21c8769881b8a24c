"""`mpispeed sbatch` and its templates: filled, checked and submitted for real; what SLURM would refuse is refused."""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import GPUS, LATE_SECONDS, refuse_or_skip

RANKS = str(Path(__file__).with_name("ranks.py"))
SMALL = ("--time", "5", "--cpus-per-task", "1")
# Stands in for Apptainer, which Debian does not have: takes its words apart and runs the command in namespaces of its
# own, so that what an MPI needs has to come through the environment, open files and the folders that are bound.
CONTAINER = """\
#!/bin/bash
[ "$1" = exec ] || exit 9
shift
while [[ "$1" == --* ]]; do
    case "$1" in
        --pwd) cd "$2" && shift 2 ;;
        --bind) [ -e "$2" ] || exit 8; shift 2 ;;
        *) shift ;;
    esac
done
[ -e "$1" ] || exit 7
shift
export INSIDE=1
exec "$@"
"""


def sbatch(slurm, folder, *words, check=True, **env):
    return slurm.run(
        sys.executable, "-m", "mpispeed.cli.main", "sbatch", "--run-dir", folder, *SMALL, *words, check=check, **env
    )


def job_of(done):
    return re.search(r"^job (\d+),", done.stdout, re.MULTILINE)[1]


@pytest.fixture(scope="module")
def jobs(slurm_cluster):
    """All jobs, submitted side by side: name -> (number, run folder)."""
    tool, image = slurm_cluster.jobs / "apptainer", slurm_cluster.jobs / "an image.sif"
    tool.write_text(CONTAINER)
    tool.chmod(0o755)
    image.touch()
    sites = {}
    for plugin, setup in (("pmi2", ""), ("pmix", "export MPI4PY_MPIABI=openmpi")):
        sites[plugin] = slurm_cluster.jobs / f"{plugin}.toml"
        sites[plugin].write_text(
            f'mpi_plugin = "{plugin}"\ncontainer_command = "{tool}"\nsetup = [{json.dumps(setup or ":")}]\n'
        )
    container = ("--image", image, "--python", sys.executable, "--nodes", 2)
    wanted = {
        "requeue": ("--template", "requeue", "--nodes", 2, RANKS, "interrupted"),
        "single": ("--ntasks-per-node", 2, "--gpus-per-node", GPUS, RANKS, "show", "a b", "$HOME"),
        "array": ("--array", "1-3%2", RANKS, "show", "seed={task}"),
        "pmi2": ("--site", sites["pmi2"], *container, RANKS, "show"),
        "pmix": ("--site", sites["pmix"], *container, RANKS, "show"),
        "multi": ("--nodes", 2, "--ntasks-per-node", 2, RANKS, "show"),
        "step": ("--ntasks-per-node", 2, RANKS, "wait"),
        "batch": ("--ntasks-per-node", 2, "--signal-seconds", 60, RANKS, "wait"),
        "stop": (RANKS, "show"),
    }
    (slurm_cluster.jobs / "run-stop").mkdir()
    (slurm_cluster.jobs / "run-stop" / "STOP").touch()
    folders = {name: slurm_cluster.jobs / f"run-{name}" for name in wanted}
    return {name: (job_of(sbatch(slurm_cluster, folders[name], *words)), folders[name]) for name, words in
            wanted.items()}  # fmt: skip


def log_of(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def shown(slurm, jobs, name, state="COMPLETED"):
    """What the ranks of a job told, in the order of ranks."""
    job, folder = jobs[name]
    assert slurm.wait(job) == state, log_of(folder)
    facts = [json.loads(line) for line in log_of(folder).splitlines() if line.startswith("{")]
    return sorted(facts, key=lambda fact: (fact["rank"], fact["words"]))


def test_single_node_sees_all_devices_and_its_words(slurm, jobs):
    facts = shown(slurm, jobs, "single")
    assert [(fact["rank"], fact["size"]) for fact in facts] == [(0, 2), (1, 2)]
    for fact in facts:
        assert fact["words"] == ["a b", "$HOME"]
        assert fact["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(GPUS)))
        assert fact["OMP_NUM_THREADS"] == "1"
        assert fact["MPISPEED_RUN_DIR"] == str(jobs["single"][1])
        assert Path(fact["MPISPEED_JOB_SCRIPT"]).read_text().startswith("#!/bin/bash\n# One node")


def test_many_nodes_form_one_world(slurm, jobs):
    facts = shown(slurm, jobs, "multi")
    assert [fact["size"] for fact in facts] == [4] * 4
    if slurm.mode == "netns":
        assert [fact["node"] for fact in facts] == ["n1", "n1", "n2", "n2"]


def test_tasks_of_an_array_have_numbers_and_folders_of_their_own(slurm, jobs):
    facts = shown(slurm, jobs, "array")
    folder = jobs["array"][1]
    assert [fact["words"] for fact in facts] == [[f"seed={task}"] for task in (1, 2, 3)]
    assert [fact["MPISPEED_RUN_DIR"] for fact in facts] == [str(folder / f"task-{task}") for task in (1, 2, 3)]
    # What follows a task must not start the whole array again.
    assert "#SBATCH --array=2\n" in (folder / "task-2" / "job.sbatch").read_text()


@pytest.mark.parametrize("plugin", ["pmi2", "pmix"])
def test_containers_form_one_world(slurm, jobs, plugin):
    if plugin == "pmix" and shutil.which("mpirun.openmpi") is None:
        refuse_or_skip(["openmpi-bin", "libpmix-dev"])
    facts = shown(slurm, jobs, plugin)
    assert [fact["size"] for fact in facts] == [2, 2]
    assert all(fact["MPISPEED_WALLTIME"].startswith(("4:", "5:")) for fact in facts)


@pytest.mark.parametrize("target", ["step", "batch"])
def test_signal_reaches_all_ranks(slurm, jobs, target):
    """From scancel to the ranks themselves, or to the batch shell, which passes it on as before the time limit."""
    job, folder = jobs[target]
    deadline = time.monotonic() + LATE_SECONDS
    while log_of(folder).count("is ready") < 2:
        assert time.monotonic() < deadline, log_of(folder)
        time.sleep(0.1)
    slurm.run("scancel", "--signal=USR1", *(["--batch"] if target == "batch" else []), job)
    assert slurm.wait(job) == "COMPLETED", log_of(folder)
    left = re.findall(r"rank (\d) got 1 signals", log_of(folder))
    assert sorted(left) == ["0", "1"]


def test_stop_file_keeps_a_job_from_starting(slurm, jobs):
    assert shown(slurm, jobs, "stop") == []
    assert "nothing is started" in log_of(jobs["stop"][1])


def test_interrupted_run_is_requeued_and_goes_on(slurm, jobs):
    job, folder = jobs["requeue"]
    assert slurm.wait(job) == "COMPLETED", log_of(folder)
    assert slurm.run("scontrol", "show", "job", job).stdout.count("Restarts=1") == 1
    lines = re.findall(r"^(?:rank|the run|job).*", log_of(folder), re.MULTILINE)
    assert sorted(lines[:2]) == ["rank 0 is interrupted", "rank 1 is interrupted"]
    assert lines[2] == f"the run was interrupted: job {job} is requeued"
    assert sorted(lines[3:]) == ["rank 0 has finished", "rank 1 has finished"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--partition", "nosuch"), "SLURM has no partition 'nosuch'; it has "),
        (("--partition", "short", "--time", "11"), "--time 11 is more than 10:00, which is what SLURM says"),
        (("--nodes", "3"), "--nodes 3 is more than the 2 that SLURM says main may have"),
        (("--gpus-per-node", GPUS + 1), "sbatch --test-only: "),
        (("--flag", "--constraint=gold"), "sbatch --test-only: "),
    ],
)  # fmt: skip
def test_refuses_what_slurm_would_refuse(slurm, tmp_path, words, message):
    done = sbatch(slurm, tmp_path / "run", *words, RANKS, "show", check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_and_output_writes(slurm, tmp_path):
    before = slurm.run("squeue", "--noheader", "--states=all").stdout.count("\n")
    done = sbatch(slurm, tmp_path / "run", "--dry-run", RANKS, "show")
    assert done.stdout.startswith("#!/bin/bash\n# One node")
    assert "not checked with sbatch" not in done.stderr
    assert not (tmp_path / "run").exists()
    sbatch(slurm, tmp_path / "run", "--output", tmp_path / "mine.sbatch", RANKS, "show")
    assert (tmp_path / "mine.sbatch").read_text() == done.stdout
    assert slurm.run("squeue", "--noheader", "--states=all").stdout.count("\n") == before
