"""Trials inside an allocation of a real SLURM: the tuner starts a step on all nodes, and another after a lost rank."""

import json
import sys
from pathlib import Path

from tests.helpers.system import CHECKOUT

TUNER = """
import json, os
from pathlib import Path
from tests.jobs.test_tune_worker import Trials

trials = Trials(Path({folder!r}), ranks=None)
with trials.job:
    found = [trials.run(*words, seconds=seconds) for words, seconds in (
        ((), 300), (("--do", "kill"), 300), ((), 300), (("--do", "hang"), 5), ((), 300)
    )]
print(json.dumps([[one.status, one.reason, one.metrics.get("train_batch_size")] for one in found]))
"""


def test_a_tuner_in_a_batch_script_and_in_a_step_of_its_own(slurm):
    jobs = {}
    for name, start in (("batch", ""), ("step", "srun --ntasks=1 --nodes=1 --overlap ")):
        folder = slurm.jobs / f"tune-{name}"
        folder.mkdir()
        script = folder / "tuner.py"
        script.write_text(TUNER.format(folder=str(folder)))
        jobs[name] = slurm.submit(
            f"{start}{sys.executable} {script}", nodes=2, ntasks_per_node=1, time=20, env={"PYTHONPATH": CHECKOUT}
        )
    for name, job in jobs.items():
        state, output = slurm.wait(job), slurm.output(job)
        logs = "".join(path.read_text() for path in Path(slurm.jobs / f"tune-{name}").glob("job-*/stderr.log"))
        assert state == "COMPLETED", output + logs
        rows = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
        assert [row[0] for row in rows] == ["ok", "killed", "ok", "hang", "ok"], output + logs
        assert "SIGKILL" in rows[1][1]
        assert rows[0][2] == rows[2][2] == rows[4][2] == 8
        steps = slurm.run("squeue", "--steps", "--noheader", f"--jobs={job}").stdout
        assert not steps.strip()
