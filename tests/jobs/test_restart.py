"""Restarts on other rank counts continue the same sample stream and the same losses."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("resume_worker.py")
PARTS = (1, 4)
STEPS = 5
STAGE = 1


def test_1_4_ranks(job, tmp_path):
    straight, chained = tmp_path / "straight", tmp_path / "chained"
    straight.mkdir()
    chained.mkdir()
    done = job(1, WORKER, straight, STEPS * len(PARTS), STAGE)
    assert done.returncode == 0, done.stderr
    for ranks in PARTS:
        done = job(ranks, WORKER, chained, STEPS, STAGE)
        assert done.returncode == 0, done.stderr
    (expected,) = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    jobs = [json.loads(line) for line in (chained / "log.jsonl").read_text().splitlines()]
    assert [part["ranks"] for part in jobs] == list(PARTS)
    assert [index for part in jobs for index in part["order"]] == expected["order"]
    losses = [loss for part in jobs for loss in part["losses"]]
    assert losses == pytest.approx(expected["losses"], rel=1e-5)


def test_elastic_2_3_ranks(job, tmp_path):
    """Batch sizes follow the number of ranks; the global batch, the samples and the losses do not."""
    section = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [3, 4, 6, 12]}
    straight, chained = tmp_path / "straight", tmp_path / "chained"
    for folder, parts in ((straight, (1,)), (chained, (2, 3))):
        folder.mkdir()
        for ranks in parts:
            done = job(ranks, WORKER, folder, 6 // len(parts), 2, "", json.dumps(section))
            assert done.returncode == 0, done.stderr
    (expected,) = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    jobs = [json.loads(line) for line in (chained / "log.jsonl").read_text().splitlines()]
    assert [len(part["order"]) for part in jobs] == [3 * 12] * 2
    assert [index for part in jobs for index in part["order"]] == expected["order"]
    # Sums over other numbers of ranks are rounded in another order.
    assert [loss for part in jobs for loss in part["losses"]] == pytest.approx(expected["losses"], rel=1e-5)


def test_2_4_ranks_with_batches_ahead(job, tmp_path):
    """The second begins inside of an epoch and goes on into the next; batches that were read ahead leave no trace."""
    straight, chained = tmp_path / "straight", tmp_path / "chained"
    straight.mkdir()
    chained.mkdir()
    assert job(1, WORKER, straight, 6, 1).returncode == 0
    for ranks, reading in ((2, {"workers": 4, "prefetch": 6}), (4, {"workers": 1, "persistent_workers": True})):
        done = job(ranks, WORKER, chained, 3, 1, "", "{}", json.dumps(reading))
        assert done.returncode == 0, done.stderr
    (expected,) = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    jobs = [json.loads(line) for line in (chained / "log.jsonl").read_text().splitlines()]
    assert [index for part in jobs for index in part["order"]] == expected["order"]
    # Sums over other numbers of ranks are rounded in another order.
    assert [loss for part in jobs for loss in part["losses"]] == pytest.approx(expected["losses"], rel=1e-5)


def test_2_3_1_ranks_swapped_or_not(job, tmp_path):
    """The straight run has everything in memory; of the restarts the second has too."""
    straight, chained, disk = tmp_path / "straight", tmp_path / "chained", tmp_path / "disk"
    for folder in (straight, chained, disk):
        folder.mkdir()
    done = job(1, WORKER, straight, 9, 3)
    assert done.returncode == 0, done.stderr
    for ranks, where in ((2, [disk]), (3, []), (1, [disk])):
        done = job(ranks, WORKER, chained, 3, 3, *where)
        assert done.returncode == 0, done.stderr
        assert ("INFO swapped " in done.stderr) == bool(where)
        assert not list(disk.rglob("*.swap"))
    (expected,) = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    jobs = [json.loads(line) for line in (chained / "log.jsonl").read_text().splitlines()]
    assert [index for part in jobs for index in part["order"]] == expected["order"]
    losses = [loss for part in jobs for loss in part["losses"]]
    # Sums over other numbers of ranks are rounded in another order.
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
