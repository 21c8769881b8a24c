"""A token store built by a job of a real SLURM: its time ends, it is requeued, and goes on with the parts there are."""

from __future__ import annotations

import json
import random
import re
import sys
import time

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens_build.job import Request, build

PART_BYTES = 64 << 10


def test_a_build_whose_time_is_over_is_requeued_and_goes_on(slurm):
    folder = slurm.jobs / "data"
    folder.mkdir()
    draw = random.Random(1)
    path, out = folder / "corpus.jsonl", folder / "corpus.h5"
    path.write_text("".join(json.dumps({"text": "word " * draw.randint(0, 300)}) + "\n" for _ in range(60000)))
    words = ("--time", 5, "--cpus-per-task", 1, "--nodes", 2, "--signal-seconds", 60)
    submitted = slurm.run(
        sys.executable, "-m", "mpispeed.cli.main", "sbatch", "--run-dir", folder / "run", *words,
        "data", "build", "-o", out, "-t", "byte", "--part-size", PART_BYTES, path,
    )  # fmt: skip
    job = re.search(r"^job (\d+),", submitted.stdout, re.MULTILINE)[1]
    assert "a build that is submitted again goes on" in submitted.stdout
    parts, end = folder / "corpus.h5.parts", time.monotonic() + 400
    while not (parts / "part-0000004").exists():
        assert time.monotonic() < end, slurm.logs()
        time.sleep(0.02)
    slurm.run("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the time limit

    def is_done_again(state):
        return state == "COMPLETED" and "Restarts=1" in slurm.run("scontrol", "show", "job", job).stdout

    slurm.wait(job, is_done_again)
    log = "".join(each.read_text() for each in (folder / "run").glob("*.log"))
    assert f"the time is over: job {job} is requeued" in log
    assert re.search(r"\d+ of \d+ parts were there already", log)
    build(solo_comm(), Request(folder / "one.h5", [path], "byte", part_bytes=1 << 24))
    assert out.read_bytes() == (folder / "one.h5").read_bytes()
    assert not parts.exists()
