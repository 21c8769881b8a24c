"""Sequences over ranks as scripts of DeepSpeed, accelerate and transformers ask for them, against one process."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("clients_worker.py")
RANKS = (1, 4, 2)
BOUND = 1e-5
"""Sums of float32 in another order."""


@pytest.fixture(scope="module")
def found(job, tmp_path_factory):
    """Name -> what the first rank found; a failure on any rank fails the test that asks."""
    folder = tmp_path_factory.mktemp("sequences")
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    jobs = {ranks: job(ranks, "--as-deepspeed", WORKER, folder, "sequences", **quiet) for ranks in RANKS}

    def get(ranks, name):
        parts = [json.loads(path.read_text()) for path in sorted((folder / str(ranks)).glob("*.json"))]
        parts = [part for part in parts if part["name"] == name]
        failures = [part["failure"] for part in parts if part["failure"]]
        assert not failures, "\n".join(failures)
        assert len(parts) == ranks, jobs[ranks].stderr[-4000:]
        return parts[0]["found"]

    return get


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("name", ["tutorial", "accelerate", "trainer"])
def test_training_equals_one_process(found, ranks, name):
    ours, plain = found(ranks, name), found(1, "plain")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=BOUND)
    assert ours["weights"] == pytest.approx(plain["weights"], rel=BOUND)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_trainer_resumes_in_an_epoch(found, ranks):
    ours, whole = found(ranks, "resumed trainer"), found(ranks, "trainer")
    assert ours["losses"] == pytest.approx(whole["losses"], rel=BOUND)
    assert ours["weights"] == pytest.approx(whole["weights"], rel=BOUND)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_whole_sequences_are_evaluated(found, ranks):
    assert found(ranks, "trainer")["eval"] == pytest.approx(found(1, "plain")["eval"], rel=BOUND)


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_distributed_attention_equals_one_process(found, ranks):
    assert found(ranks, "distributed attention")["worst"] < BOUND
