"""trl's trainers over `import deepspeed`: fine-tuning, and generation with rewards while the model is sharded."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "trl_worker.py"


def test_fine_tuning_and_rewards_on_two_ranks(job, tmp_path):
    done = job(2, "--as-deepspeed", WORKER, tmp_path, PYTHONWARNINGS="ignore", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for stage in (2, 3):
        assert found[f"sft {stage}"] == pytest.approx(found["sft ddp"], rel=1e-5)
    # the same texts are drawn at both stages, from the same numbers; the second step follows an update
    assert found["grpo 2"] == pytest.approx(found["grpo 3"], rel=1e-4, abs=1e-6)
    assert found["grpo 2"][1] != 0
