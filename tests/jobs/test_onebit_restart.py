"""1-bit optimizers go on with other numbers of ranks: what errors of coding come to stays, and so does the loss."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("onebit_worker.py")


def test_3_ranks_to_1_and_2(job, tmp_path):
    for how, ranks in (("save", 3), ("load", 2), ("load", 1)):
        done = job(ranks, WORKER, how, tmp_path)
        assert done.returncode == 0, done.stderr
    unbroken, *others = (json.loads((tmp_path / f"{ranks}.json").read_text()) for ranks in (3, 2, 1))
    for ranks, found in zip((2, 1), others, strict=True):
        for name, (far, loss) in found.items():
            assert far < 2**-22, name  # of the rounding of a mean to fp32, beside sums of it in fp64
            assert loss <= unbroken[name][1] * (1 + 5e-3), name
            if ranks > 1:  # one rank codes nothing, and may end lower
                assert loss == pytest.approx(unbroken[name][1], rel=5e-3), name
