"""Sequences over ranks as scripts of DeepSpeed, accelerate and transformers ask for them, against one process."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("clients_worker.py")
RANKS = 4
BOUND = 1e-5
"""Sums of float32 in another order."""


@pytest.fixture(scope="module")
def found(job, tmp_path_factory):
    """Name -> what the first rank found; a failure on any rank fails the test that asks."""
    folder = tmp_path_factory.mktemp("sequences")
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = job(RANKS, "--as-deepspeed", WORKER, folder, "sequences", **quiet)
    cases = [json.loads(path.read_text()) for path in sorted((folder / str(RANKS)).glob("*.json"))]

    def get(name):
        parts = [case for case in cases if case["name"] == name]
        failures = [part["failure"] for part in parts if part["failure"]]
        assert not failures, "\n".join(failures)
        assert len(parts) == RANKS, done.stderr[-4000:]
        return parts[0]["found"]

    return get


@pytest.mark.parametrize("name", ["tutorial", "accelerate", "trainer"])
def test_training_equals_one_process(found, name):
    ours, plain = found(name), found("plain")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=BOUND)
    assert ours["weights"] == pytest.approx(plain["weights"], rel=BOUND)


def test_a_trainer_resumes_in_an_epoch(found):
    ours, whole = found("resumed trainer"), found("trainer")
    assert ours["losses"] == pytest.approx(whole["losses"], rel=BOUND)
    assert ours["weights"] == pytest.approx(whole["weights"], rel=BOUND)


def test_whole_sequences_are_evaluated(found):
    assert found("trainer")["eval"] == pytest.approx(found("plain")["eval"], rel=BOUND)


def test_distributed_attention_equals_one_process(found):
    assert found("distributed attention")["worst"] < BOUND
