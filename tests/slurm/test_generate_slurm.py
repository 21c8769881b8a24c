"""Batch generation that outlives its jobs, on a real SLURM: it stops before the limit, is requeued, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.system import CHECKOUT

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "try_generate.py"
WORKER = ROOT / "tests" / "jobs" / "generate_worker.py"
PROMPTS = 60
SCRIPT = """\
export MPISPEED_RUN_DIR={folder}
srun --mpi=pmi2 --kill-on-bad-exit=1 {python} {worker} '{wishes}'
code=$?
if grep -q '"state": "interrupted"' {folder}/state.json; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def test_a_job_stops_before_its_limit_is_requeued_and_answers_the_rest(slurm):
    folder = slurm.jobs / "generate"
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": CHECKOUT, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, EXAMPLE, folder, str(PROMPTS)], env=environ, check=True, capture_output=True)
    out = folder / "answers.jsonl"
    # Slow enough not to be done when it stops, some 35 s after its start; not slow when it was requeued.
    wishes = {
        "model": f"{folder}/model", "prompts": f"{folder}/prompts.jsonl", "out": str(out), "nap": 0.4, "margin": 80,
        "chain": "requeue",
    }  # fmt: skip
    text = SCRIPT.format(folder=folder, python=sys.executable, worker=WORKER, wishes=json.dumps(wishes))
    job = slurm.submit(text, nodes=2, ntasks_per_node=1, time=2, job_name="generate", requeue=True)

    def is_done_again(state):
        return state == "COMPLETED" and "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout

    slurm.wait(job, is_done_again)
    told = slurm.output(job)
    assert "needed for another batch" in told, told
    assert "the run ends at step" in told
    assert "batches are finished, found in" in told
    assert json.loads((folder / "state.json").read_text())["state"] == "finished"
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [f"p{number}" for number in range(PROMPTS)]
    assert all(answer["new_tokens"] for answer in answers)
