"""A job ends with the error that one stage of a pipeline raised, not with what other ranks make of it."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("pipeline_worker.py")


@pytest.mark.parametrize(
    ("layout", "rank"),
    # Of two slices of one stage one alone fails: the other waits in a layer for ever, as it would without a pipeline.
    [pytest.param((2, 1), 0, id="stages"), pytest.param((1, 2), 1, id="slices")],
)
def test_the_job_ends_with_the_error_itself(layout, rank, job):
    done = job(2, WORKER, "forward", *layout, rank)
    assert done.returncode == 1, done.stderr
    assert f"uncaught error on rank {rank}" in done.stderr
    assert "Planted: forward of micro-batch 1" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "failed on stage" not in done.stderr
