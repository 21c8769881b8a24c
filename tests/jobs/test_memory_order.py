"""Peaks of memory fall with the stage, and making a model takes no more than a step."""

import json
from pathlib import Path

WORKER = Path(__file__).with_name("memory_worker.py")
LAYERS_BYTES = 12 * 1536 * 1536 * 4


# The heap of the C library keeps holes between torch's temporaries, more or less of them from run to run.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def test_each_stage_peaks_below_the_one_before(job):
    done = job(2, WORKER, **MAPPED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    made, steps = ({name: sizes[kind] for name, sizes in found.items()} for kind in (0, 1))
    assert steps["stage 3"] < steps["stage 2"] < steps["stage 1"]
    # Stage 3 saves half of the weights and of the gradients, but for two whole blocks and the buckets of three.
    assert steps["stage 1"] - steps["stage 3"] > LAYERS_BYTES // 4
    for name in found:
        assert made[name] <= steps[name]
