"""Peaks of memory fall with the stage, and making a model that is born cut takes no more than a step."""

import json
from pathlib import Path

WORKER = Path(__file__).with_name("memory_worker.py")
LAYERS_BYTES = 8 * 1536 * 1536 * 4


def test_each_stage_peaks_below_the_one_before(job):
    done = job(2, WORKER)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    made, steps = ({name: sizes[kind] for name, sizes in found.items()} for kind in (0, 1))
    # A state that is cut over two ranks saves a half of the weights; a quarter of that may be lost to buffers.
    assert steps["stage 3"] < steps["stage 2"] < steps["stage 1"]
    assert steps["stage 1"] - steps["stage 3"] > LAYERS_BYTES // 2
    assert made["born cut"] <= steps["born cut"]
    assert made["born cut"] < made["stage 3"]
