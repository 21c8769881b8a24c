"""What launchers say, and when it contradicts the MPI library."""

import os
import subprocess
import sys

import pytest

from mpispeed.base.errors import ConfigError
from mpispeed.base.launched import launched_rank
from mpispeed.mesh import launcher

MPICH, OPEN_MPI = "MPICH Version: 5.0.2\nmore", "Open MPI v5.0.11, package: x"

RENDEZVOUS = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("env", "library", "words"),
    [
        ({"PMI_SIZE": "4"}, OPEN_MPI, "PMI_SIZE=4.*Open MPI v5.0.11, package: x.*different MPIs"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPICH, "OMPI_COMM_WORLD_SIZE=2.*MPICH Version: 5.0.2"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, MPICH, "--mpi=pmi2"),
        ({"SLURM_STEP_NUM_TASKS": "3"}, OPEN_MPI, "--mpi=pmix"),
        ({"SLURM_STEP_NUM_TASKS": "3", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, MPICH, "--mpi=pmi2"),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, OPEN_MPI, "PMI_SIZE=4"),
        ({"PMI_SIZE": "4", **RENDEZVOUS}, OPEN_MPI, "PMI_SIZE=4"),
        (RENDEZVOUS, MPICH, "WORLD_SIZE=2.*mpispeed run -n 2 .*unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"),
    ],
)
def test_worlds_of_one_are_refused(env, library, words):
    with pytest.raises(ConfigError, match=words):
        launcher.check(1, library, env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PMI_SIZE": "1"},
        {"SLURM_NTASKS": "8"},
        {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "1"},
        {"SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "none"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {**RENDEZVOUS, "WORLD_SIZE": "1"},
        {**RENDEZVOUS, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
        {"WORLD_SIZE": "", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_lone_processes_pass(env):
    launcher.check_torchrun(env)
    launcher.check(1, MPICH, env)
    launcher.check_alone(ImportError("no mpi4py"), env)


def test_a_joined_world_passes():
    launcher.check(4, MPICH, {"PMI_SIZE": "4"})
    launcher.check(2, MPICH, {"PMI_SIZE": "4"})


TORCHRUN = {**RENDEZVOUS, "TORCHELASTIC_RUN_ID": "none"}
BY_SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}


@pytest.mark.parametrize("env", [{}, {**BY_SRUN, "WORLD_SIZE": "8", "RANK": "5"}, {**BY_SRUN, "RANK": "0"}])
def test_workers_of_torchrun_are_refused_before_mpi_is_joined(env):
    """Also under srun, whose variables they inherit: joining as the process they are not would hang, or abort."""
    with pytest.raises(ConfigError, match=r"torchrun started [28] processes .*unset WORLD_SIZE TORCHELASTIC_RUN_ID"):
        launcher.check_torchrun({**TORCHRUN, **env})


def test_ranks_that_are_those_of_mpi_too_may_carry_the_variables_of_torchrun():
    launcher.check_torchrun({**TORCHRUN, **BY_SRUN})
    launcher.check(2, MPICH, {**TORCHRUN, **BY_SRUN})
    assert launched_rank({**TORCHRUN, **BY_SRUN}) == 1


def test_launched_without_mpi_is_refused():
    with pytest.raises(ConfigError, match=r"PMI_SIZE=2.*no module.*mpispeed\[mpich\]"):
        launcher.check_alone(ImportError("no module"), {"PMI_SIZE": "2"})


@pytest.mark.parametrize(
    ("env", "cure"),
    [
        ({"PMIX_RANK": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun --mpi=pmi2"),
        ({"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_ID": "0"}, "Start with"),
        ({"PMIX_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, ""),
        ({"PMIX_RANK": "0", "MPI4PY_MPIABI": "openmpi"}, ""),
        ({"PMIX_RANK": "0", "MPI4PY_LIBMPI": "/x/libmpi.so"}, ""),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ""),
        ({}, ""),
    ],
)
def test_mpich_of_a_wheel_is_warned_of_pmix(monkeypatch, caplog, env, cure):
    monkeypatch.setattr(launcher.importlib.metadata, "version", {"mpich": "5.0.2"}.__getitem__)
    launcher.warn_early(env)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * bool(cure)
    assert cure in caplog.text


def test_ranks_yield_when_they_outnumber_cores():
    many = str(len(launcher.cores()) + 1)
    env = {"MPI_LOCALNRANKS": many}
    launcher.prepare(env)
    assert env["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1"
    env = {"MPI_LOCALNRANKS": many, "MPIR_CVAR_POLLS_BEFORE_YIELD": "1000"}
    launcher.prepare(env)
    assert env["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1000"
    for calm in ({"MPI_LOCALNRANKS": "1"}, {}):
        launcher.prepare(calm)
        assert "MPIR_CVAR_POLLS_BEFORE_YIELD" not in calm


def test_numbers_by_the_launcher():
    assert launched_rank({"PMI_SIZE": "4", "PMI_RANK": "3", "SLURM_PROCID": "1"}) == 3
    assert launched_rank({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}) == 2
    assert launched_rank({"SLURM_PROCID": "2"}) == 0
    assert launched_rank({}) == 0


LONE = """
import sys
class NoMpi:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ImportError("not on this machine")
sys.meta_path.insert(0, NoMpi())
import torch
from mpispeed.mesh import Mesh, Topology, start
world = start()
mesh = Mesh(Topology({"data": 1}), world)
x = torch.ones(3)
mesh["data"].start_all_reduce(x).wait()
mesh.channel("grads")["data"].all_reduce(x)
mesh.close()
print(world.size, x.sum().item())
"""


def run_alone(**env):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    return subprocess.run(
        [sys.executable, "-c", LONE], env={**kept, **env}, capture_output=True, text=True, check=False
    )


def test_one_rank_needs_no_mpi():
    done = run_alone()
    assert (done.returncode, done.stdout) == (0, "1 3.0\n"), done.stderr


def test_processes_that_cannot_meet_say_so_once():
    first, second = run_alone(PMI_SIZE="2", PMI_RANK="0"), run_alone(PMI_SIZE="2", PMI_RANK="1")
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("mpispeed: error: the launcher started 2 processes (PMI_SIZE=2)")
    assert "not on this machine" in first.stderr
    assert "Traceback" not in first.stderr
    assert second.stderr == ""
