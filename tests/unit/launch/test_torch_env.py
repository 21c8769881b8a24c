"""Variables of torch.distributed from those of launchers: places, host of rank 0, port, and what cannot be known."""

import os

import pytest

from mpispeed.base.errors import UsageError
from mpispeed.base.ports import port_of
from mpispeed.launch import rank, torch_env
from mpispeed.launch.hosts import Host, first_slurm_name
from mpispeed.launch.torch_env import advice, host_variables, launcher_pid, set_torch_variables, torch_variables

# As seen under MPICH 5 and 4, Open MPI 4.1, SLURM 22.05.
HYDRA = {"PMI_FD": "9", "PMI_SIZE": "3", "PMI_RANK": "2", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "PMIX_NAMESPACE": "760741889", "PMIX_RANK": "2",
}  # fmt: skip
JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4"}
STEP = {
    **JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_DISTRIBUTION": "block",
}  # fmt: skip
PMI2 = {**STEP, "PMI_FD": "12", "PMI_SIZE": "4", "PMI_RANK": "3", "PMI_JOBID": "7.3"}
PMIX = {**STEP, "PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.7.3"}
# The ranks of MPICH's mpirun in a job have the step of its two helpers.
HYDRA_IN_JOB = {
    **STEP, **HYDRA, "PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI_APART = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip


def places(env):
    """(rank, size, local rank, local size, node, address) as texts."""
    found = torch_variables(env)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
    return " ".join(found.get(name, "-") for name in names)


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, "0 1 0 1 0 127.0.0.1"),
        (HYDRA, "2 3 2 3 0 127.0.0.1"),
        (OPEN_MPI, "2 3 2 3 0 127.0.0.1"),
        (STEP, "3 4 1 2 1 n1"),
        (PMI2, "3 4 1 2 1 n1"),
        (PMIX, "3 4 1 2 1 n1"),
        ({**STEP, "SLURM_STEP_NODELIST": "gpu[07,09]"}, "3 4 1 2 1 gpu07"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}, "3 4 1 4 0 127.0.0.1"),
        (HYDRA_IN_JOB, "3 4 1 2 - n1"),
        ({**OPEN_MPI_APART, **JOB}, "2 3 0 2 - n1"),
        ({**OPEN_MPI_APART, "MASTER_ADDR": "far"}, "2 3 0 2 - far"),
        ({**OPEN_MPI_APART, "MASTER_ADDR": "far", "MPISPEED_HOST_RANKS": "2,1"}, "2 3 0 2 1 far"),
        ({**HYDRA, "MPISPEED_HOST_RANKS": "2,2,2"}, "2 3 2 3 0 127.0.0.1"),
        (JOB, "0 1 0 1 0 127.0.0.1"),
        ({**STEP, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0",
          "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}, "0 1 0 1 0 127.0.0.1"),
        (TORCHRUN, "5 8 1 4 - h"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "0 1 0 1 0 127.0.0.1"),
    ],
)  # fmt: skip
def test_places_and_host_by_launcher(env, wanted):
    assert places(env) == wanted


def test_ports_differ_by_job_and_step_and_agree_among_ranks(monkeypatch):
    def port(env):
        return int(torch_variables(env)["MASTER_PORT"])

    assert port(PMI2) == port(PMIX) == port(STEP) == port({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    others = [{"SLURM_STEP_ID": "4"}, {"SLURM_JOB_ID": "8"}]
    assert len({port(STEP), *(port({**STEP, **other}) for other in others)}) == 3
    assert port(OPEN_MPI) == port({**OPEN_MPI_APART, **JOB, "SLURM_STEP_ID": "1"})  # its helpers are a step
    assert port(OPEN_MPI) != port({**OPEN_MPI, "PMIX_NAMESPACE": "760741890"})
    monkeypatch.setattr(torch_env, "launcher_pid", lambda _name: "11")
    first = port(HYDRA)
    monkeypatch.setattr(torch_env, "launcher_pid", lambda _name: "12")
    assert port(HYDRA) != first
    assert port(HYDRA_IN_JOB) == port({**HYDRA_IN_JOB, "PMI_RANK": "0", "MPI_LOCALRANKID": "0"})
    assert torch_variables({**STEP, "MASTER_PORT": "5"})["MASTER_PORT"] == "5"
    assert all(10000 <= port_of([str(number)]) < 30000 for number in range(200))
    assert 10000 <= port({}) < 30000


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (OPEN_MPI_APART, "OMPI_COMM_WORLD_SIZE is 3, and 2 of these ranks are here.*set MASTER_ADDR"),
        ({**STEP, "SLURM_DISTRIBUTION": "arbitrary"}, "set MASTER_ADDR"),
        ({**HYDRA, "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "far"}, "neither the number of a job.*set MASTER_PORT"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "does not tell which of them share a node; set LOCAL_RANK"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE is 2, but PMI_RANK is not set"),
    ],
)
def test_what_cannot_be_known_is_asked_for(env, words):
    with pytest.raises(UsageError, match=words):
        torch_variables(env)


def test_numbers_that_contradict_are_replaced_with_one_warning():
    first = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    env = {**first, "RANK": "2", "WORLD_SIZE": "9", "LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "2"}
    warning = set_torch_variables(env)
    assert "RANK=2, WORLD_SIZE=9 in the environment" in warning
    assert "replaced by RANK=0, WORLD_SIZE=4, the numbers of srun;" in warning
    assert (env["RANK"], env["WORLD_SIZE"]) == ("0", "4")
    assert set_torch_variables(env) == ""
    assert set_torch_variables({**STEP, "RANK": "2", "WORLD_SIZE": "9"}) == ""  # rank 3

    assert "MASTER_ADDR=127.0.0.1 in" in set_torch_variables({**first, "MASTER_ADDR": "127.0.0.1"})
    assert "a world of one, without a launcher" in set_torch_variables({"RANK": "1"})


def test_batch_shell_is_told_that_it_is_no_rank():
    assert "batch shell of SLURM job 7 with 4 tasks" in advice(JOB, torch_variables(JOB))
    for env in ({**JOB, "SLURM_NTASKS": "1"}, STEP, PMI2):
        assert not advice(env, torch_variables(env))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("n1", "n1"), ("n[1-2]", "n1"), ("n[01-03,7],login", "n01"), ("a,b", "a"), ("r[1-2]n[3,4]-ib,x", "r1n3-ib"),
        ("", ""),
    ],
)  # fmt: skip
def test_first_host_of_slurms_short_form(text, name):
    assert first_slurm_name(text) == name


def test_launcher_is_the_nearest_process_above_that_is_no_rank(tmp_path):
    tree = {30: (20, b"PMI_RANK=1\0A=1"), 20: (10, b"A=1\0PMI_RANK=1\0"), 10: (5, b"A=PMI_RANK=\0"), 5: (1, b"")}
    for pid, (parent, variables) in tree.items():
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "environ").write_bytes(variables)
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0")
    assert launcher_pid("PMI_RANK", tmp_path, 30) == launcher_pid("PMI_RANK", tmp_path, 10) == "10"
    assert launcher_pid("PMI_RANK", tmp_path, 40) == ""  # of another namespace
    assert launcher_pid("PMI_RANK", tmp_path, 1) == ""
    assert launcher_pid("PMI_RANK", tmp_path / "none") == str(os.getppid())


def test_hosts_of_a_start(monkeypatch):
    pair = (Host("a", (0, 1)), Host("b", (0,)))
    found = host_variables(pair, keeps_order=True)
    assert (found["MPISPEED_HOST_RANKS"], found["MASTER_ADDR"]) == ("2,1", "a")
    assert 10000 <= int(found["MASTER_PORT"]) < 30000
    assert host_variables(pair[:1], keeps_order=True) == {"MPISPEED_HOST_RANKS": "2"}
    assert host_variables((), keeps_order=True) == host_variables(pair, keeps_order=False) == {}
    monkeypatch.setattr(torch_env.socket, "gethostname", lambda: "own")
    assert host_variables((Host("localhost", (0,)), pair[1]), keeps_order=True)["MASTER_ADDR"] == "own"


@pytest.mark.parametrize(("code", "words"), [(None, ""), (0, ""), (3, "3"), ("text", "1"), (True, "1")])
def test_failing_rank_tells_hydra_once_it_ends(monkeypatch, code, words):
    ours, theirs = torch_env.socket.socketpair()
    monkeypatch.delitem(rank.sys.modules, "mpi4py.MPI", raising=False)
    with ours, theirs:
        ending = rank.LauncherEnd({**HYDRA, "PMI_FD": str(ours.fileno())})
        other = rank.LauncherEnd({**PMI2, "PMI_FD": str(ours.fileno())})  # srun ends the step itself
        for each in (ending, other):
            each.set_code(code)
            each.end()
        theirs.setblocking(False)
        assert (theirs.recv(100) if words else b"") == (f"cmd=abort exitcode={words}\n".encode() if words else b"")


def test_another_file_in_the_place_of_the_connection_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(rank.sys.modules, "mpi4py.MPI", raising=False)
    ours, theirs = torch_env.socket.socketpair()
    with ours, theirs, (tmp_path / "file").open("wb") as file:
        ending = rank.LauncherEnd({**HYDRA, "PMI_FD": str(ours.fileno())})
        os.dup2(file.fileno(), ours.fileno())
        ending.set_code(1)
        ending.end()
    assert not (tmp_path / "file").read_bytes()
