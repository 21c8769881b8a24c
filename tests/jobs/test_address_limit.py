"""Model states of four times the memory that a rank may add: in files they train, in memory they are refused."""

import json
import math
from pathlib import Path

WORKER = Path(__file__).with_name("address_worker.py")
RANKS = 2
MORE_BYTES = 128 << 20
LAYER_BYTES = 18 << 20
"""Parameters, masters, moments and gradients of one layer of the worker."""

LIMIT_SECONDS = 400


def test_states_of_four_times_what_may_be_added(job, tmp_path):
    def run(where, layers, limit=0):
        return job(RANKS, WORKER, where, layers, limit, limit_seconds=LIMIT_SECONDS)

    tiny = run(tmp_path, 2)
    assert tiny.returncode == 0, tiny.stderr
    limit = max(rank["peak"] for rank in json.loads(tiny.stdout)) + MORE_BYTES
    layers = math.ceil(4 * MORE_BYTES * RANKS / LAYER_BYTES)

    swapped = run(tmp_path, layers, limit)
    assert swapped.returncode == 0, swapped.stderr
    found = json.loads(swapped.stdout)
    assert len(found) == RANKS
    for rank in found:
        assert rank["peak"] <= limit
        assert rank["swapped"] >= 4 * MORE_BYTES
        assert 0 < rank["buffers"][0] <= rank["buffers"][1] < MORE_BYTES // 2
        assert rank["arena"] < MORE_BYTES // 2
    assert list(tmp_path.iterdir()) == []

    refused = run("-", layers, limit)
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("mpispeed: error:") == 1
    assert "Traceback" not in refused.stderr
    for word in ("host memory", "RLIMIT_AS", "offload_optimizer"):
        assert word in refused.stderr

    free = run("-", layers)
    assert [rank["losses"] for rank in json.loads(free.stdout)] == [rank["losses"] for rank in found], free.stderr
