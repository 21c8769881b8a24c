"""The cluster of these tests itself: what is left of a killed one is removed, and nothing else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import slurm_cluster
from tests.helpers.slurm_cluster import ROOT, end_strays, refuse_or_skip

STARTS = (
    "from tests.helpers.slurm_cluster import SlurmCluster as C\nwith C() as c: print(c.folder, flush=True); input()"
)


def test_killed_cluster_is_removed_and_this_one_stays(slurm):
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=slurm.environment | {slurm_cluster.MARK: ""},
    )  # fmt: skip
    folder = Path(process.stdout.readline().strip())
    assert folder.name.startswith(slurm_cluster.PREFIX)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    end_strays()
    assert not folder.exists()
    assert not list(slurm_cluster.processes_of(folder))
    assert not list(Path("/run/netns").glob(f"{folder.name}-*"))
    assert slurm.run("scontrol", "ping").stdout.count(" UP") == 1


def test_missing_packages_skip_on_a_laptop_and_fail_in_ci(monkeypatch):
    monkeypatch.setattr(slurm_cluster, "PROGRAMS", {"no-such-daemon": "slurmctld", "sh": "dash"})
    assert slurm_cluster.missing_programs() == ["slurmctld"]
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install slurmctld"):
        refuse_or_skip(["slurmctld"])
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install slurmctld"):
        refuse_or_skip(["slurmctld"])
