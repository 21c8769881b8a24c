"""The batch templates: filled, they are shell scripts that reach the training through srun and check the world."""

import os
import re
import shlex
import subprocess
from string import Template

import pytest

from mpispeed.base import assets

TEMPLATES = sorted((assets.folder("slurm") / "templates").glob("*.sbatch"))
FAKE_SRUN = """#!/bin/bash
while [ $# -gt 0 ] && [[ "$1" == --* ]]; do echo "flag $1" >> "$SRUN_LOG"; shift; done
for _ in $(seq "${SRUN_TASKS:-1}"); do "$@"; done
"""


def fill(template, folder, **changes):
    values = {
        "job_name": "gpt", "partition": "main", "time_limit": "00:10:00", "nodes": 2, "ranks_per_node": 3,
        "cores_per_rank": 4, "mpi_plugin": "pmi2", "work_folder": shlex.quote(str(folder)), "log_folder": folder,
        "setup": "export SITE=ready$NO_SUCH_VARIABLE",
        "python": shlex.quote(str(folder / "python")), "script": "train.py", "config": "ds.json",
        "arguments": "--steps 3",
    }  # fmt: skip
    return Template(template.read_text()).substitute({**values, **changes})


def start(template, folder, world, **changes):
    """Run the filled script with an srun that runs its command once, and a python that reports its world."""
    for name, text in (
        ("srun", FAKE_SRUN),
        ("python", f'#!/bin/bash\nif [ "$1" = -c ]; then echo {world}; else echo "ran $* SITE=$SITE"; fi\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = folder / "job.sbatch"
    job.write_text(fill(template, folder, **changes))
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4", "SRUN_LOG": str(folder / "log")}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", job], env={**os.environ, **slurm, "PATH": path}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_shell_accepts_the_filled_template(template, tmp_path):
    job = tmp_path / "job.sbatch"
    job.write_text(fill(template, tmp_path))
    subprocess.run(["bash", "-n", job], check=True)
    assert re.findall(r"^#SBATCH --(?:job-name|time)=(\S+)", job.read_text(), re.MULTILINE) == ["gpt", "00:10:00"]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_starts_the_script_through_srun(template, tmp_path):
    done = start(template, tmp_path, world=6)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran -m mpi4py train.py --deepspeed_config ds.json --steps 3 SITE=ready"
    flags = (tmp_path / "log").read_text()
    assert "flag --mpi=pmi2" in flags
    assert "flag --cpus-per-task=4" in flags


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_quoted_values_reach_the_script_unchanged(template, tmp_path):
    folder = tmp_path / 'my "run" $(touch hurt)'
    folder.mkdir()
    done = start(
        template, folder, world=6, config=shlex.quote("a b.json"), arguments=shlex.join(["--name", "$HOME 'x'"])
    )
    assert done.returncode == 0, done.stderr
    assert "--deepspeed_config a b.json --name $HOME 'x' SITE" in done.stdout
    assert not list(tmp_path.rglob("hurt"))


def test_refuses_worlds_of_one(tmp_path):
    multi = next(path for path in TEMPLATES if path.stem == "multi")
    done = start(multi, tmp_path, world=1)
    assert done.returncode == 1
    assert "a world of 1 instead of 6 ranks" in done.stderr
    assert "ran" not in done.stdout


def test_readme_names_every_value():
    readme = (assets.folder("slurm") / "README.md").read_text()
    for template in TEMPLATES:
        names = set(re.findall(r"(?<!\$)\$([a-z_]+)", template.read_text()))
        missing = sorted(name for name in names if f"`{name}`" not in readme)
        assert not missing, f"{template.name} uses {missing}, slurm/README.md does not explain them"
