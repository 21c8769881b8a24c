"""`mpispeed run` inside an allocation: where ranks go, by srun and by mpirun, and a job that is started again."""

import json
import sys

import pytest

RUN = f"{sys.executable} -m mpispeed.cli.main run"
PROBE = """
import json, os, signal, socket, time
from mpi4py import MPI
comm, restarts = MPI.COMM_WORLD, os.environ.get("MPISPEED_RESTART_COUNT", "1")
hosts = comm.gather(socket.gethostname())
devices = comm.gather(os.environ.get("CUDA_VISIBLE_DEVICES"))
if comm.rank == 0:
    facts = {"hosts": hosts, "devices": devices, "restarts": restarts}
    print(json.dumps(facts), flush=True)
comm.Barrier()  # MPI moves nothing of a rank that sleeps
if comm.rank == comm.size - 1 and restarts == "0":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
"""
HOSTFILE = "printf 'n2 slots=1\\nn1 slots=2\\n' > hosts"
EVEN = ["n1", "n1", "n2", "n2"]
CASES = {
    "plain": (f"{RUN} probe.py", EVEN),
    "one node": (f"{RUN} --include n2:1 probe.py", ["n2"]),
    "uneven": (f"{HOSTFILE}; {RUN} --hostfile hosts --include n1:0,3@n2 probe.py", ["n2", "n1", "n1"]),
    "mpirun": (f"{RUN} --launcher mpirun probe.py", EVEN),
    "uneven mpirun": (f"{HOSTFILE}; {RUN} --launcher mpirun --hostfile hosts probe.py", ["n1", "n1", "n2"]),
    "elastic": (f"{RUN} --elastic --restart-pause 0.2 probe.py", EVEN),
}


@pytest.fixture(scope="module")
def jobs(slurm_cluster):
    """All of them, submitted side by side: name -> number of the job."""
    found = {}
    for name, (command, _) in CASES.items():
        folder = slurm_cluster.jobs / name.replace(" ", "-")
        folder.mkdir()
        (folder / "probe.py").write_text(PROBE)
        found[name] = slurm_cluster.submit(f"cd {folder}; {command}", nodes=2, ntasks_per_node=2, time=20)
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_ranks_go_where_they_are_asked_for(slurm, jobs, name):
    assert slurm.wait(jobs[name]) == "COMPLETED", slurm.output(jobs[name])
    output = slurm.output(jobs[name])
    worlds = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [world["hosts"] for world in worlds] == [CASES[name][1]] * (2 if name == "elastic" else 1), output
    devices = {"one node": ["1"], "uneven": ["0", "0,3", "0,3"]}
    assert worlds[0]["devices"] == devices.get(name, [None] * len(CASES[name][1]))
    if name == "elastic":
        assert [world["restarts"] for world in worlds] == ["0", "1"]
        assert "restart 1 of 3 on n1 (2), n2 (2)" in output
