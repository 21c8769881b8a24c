"""A plain torch script as a batch job over two nodes: its ranks meet by variables that come from those of SLURM."""

import re
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ddp.py"

GLOO = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, " ".join(os.environ[name] for name in names))
if dist.get_rank() == 0:
    print(found, flush=True)
dist.destroy_process_group()
"""


def test_torch_template_starts_a_script_that_knows_nothing_of_mpi(slurm):
    folder = slurm.jobs / "run-torch"
    script = slurm.jobs / "plain_torch.py"
    script.write_text(GLOO)
    host = "n1" if slurm.mode == "netns" else "127.0.0.1"  # where n1 is no host that can be reached by its name
    site = slurm.jobs / "torch.toml"
    site.write_text(f'setup = ["{":" if host == "n1" else f"export MASTER_ADDR={host}"}"]\n')
    done = slurm.run(
        sys.executable, "-m", "mpispeed.cli.main", "sbatch", "--template", "torch", "--nodes", 2, "--time", 5,
        "--cpus-per-task", 1, "--site", site, "--run-dir", folder, script, MASTER_ADDR="of.another.job",
    )  # fmt: skip
    job = re.search(r"^job (\d+),", done.stdout, re.MULTILINE)[1]
    state = slurm.wait(job)
    log = "".join(path.read_text() for path in folder.glob("*.log"))
    assert state == "COMPLETED", log
    assert f"['0 2 0 1 0 {host}', '1 2 0 1 1 {host}']" in log


def test_the_same_script_runs_by_srun_on_two_nodes(slurm):
    words = f"--mpi=pmi2 --kill-on-bad-exit=1 {sys.executable} {EXAMPLE} --steps 5"
    jobs = [
        slurm.submit(f"srun {words}", nodes=nodes, ntasks_per_node=2 // nodes, time=20, env={"OMP_NUM_THREADS": "1"})
        for nodes in (1, 2)
    ]
    for job in jobs:
        assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    one, two = (re.findall(r"on 2 ranks: loss (\S+)", slurm.output(job)) for job in jobs)
    assert len(one) == 1
    assert one == two
