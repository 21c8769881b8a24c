"""A rank that is killed in a job of two nodes: the job ends, says why once, and the logs have its last words."""

import sys

JOIN = """\
import os
import signal
import time
import torch
import mpispeed
world = mpispeed.init_distributed()
one = torch.ones(1)
world.comm.all_reduce(one)
print(f"rank {world.rank} of {world.size} sees {one.item():g}")
if world.rank == 1:
    time.sleep(1)
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
world.comm.all_reduce(one)
"""


def test_a_killed_rank_is_explained_and_its_log_is_whole(slurm):
    script, run = slurm.jobs / "killed.py", slurm.jobs / "killed-run"
    script.write_text(JOIN)
    job = slurm.submit(
        f"srun --mpi=pmi2 {sys.executable} -m mpi4py {script}",
        nodes=2, ntasks_per_node=1, time=20, env={"MPISPEED_RUN_DIR": str(run), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert slurm.wait(job) == "FAILED", slurm.output(job)
    output = slurm.output(job)
    said = [line for line in output.splitlines() if line.startswith("mpispeed: ")]
    assert len(said) == 1, output
    assert "rank 1" in said[0]
    assert "killed from outside (SIGKILL)" in said[0]
    logs = [(run / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert logs[1].count("o last words\n") == 1
    assert [f"o rank {rank} of 2 sees 2\n" in log for rank, log in enumerate(logs)] == [True, True]
