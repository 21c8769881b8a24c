"""Trials of the examples: a pipeline, transformers' Trainer, and a script that never calls `initialize`."""

import json
import os
from pathlib import Path

import pytest

from mpispeed.compat.as_deepspeed import with_folder
from mpispeed.launch.options import Wishes
from mpispeed.tuning.job import WorkerJob
from mpispeed.tuning.protocol import Task
from tests.helpers.system import CHECKOUT

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
IS_FULL = os.environ.get("MPISPEED_MATRIX") == "full"
NO_ENGINE = "the script ended without a call of mpispeed.initialize"


def pipeline(folder):
    base = json.loads((EXAMPLES / "pipeline_config.json").read_text())
    del base["train_batch_size"]
    words = ["train_pipeline.py", "--config", "pipeline_config.json", "--cap_bytes", "200000", "--save_dir", folder]
    for steps in (4, 2):
        yield words, {**base, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps}, 2 * steps


def trainer(folder):
    words = ["hf_trainer.py", "--steps", "20", "--out", folder]
    for stage, rows in ((3, 16), (1, 16)):
        yield words, {"zero_optimization": {"stage": stage}}, 2 * rows


def plain(folder):
    for _ in range(2):
        yield ["ddp.py", "--steps", "2"], {}, NO_ENGINE


CASES = {"pipeline": pipeline, "trainer": trainer, "plain": plain}


@pytest.mark.skipif(not IS_FULL, reason="half a minute for each; part of make matrix")
@pytest.mark.parametrize("name", CASES)
def test_trials_of_an_example(name, tmp_path):
    if name == "trainer":
        pytest.importorskip("transformers")
    saved = tmp_path / "saved"
    cases = list(CASES[name](str(saved)))
    words = [str(EXAMPLES / cases[0][0][0]), *cases[0][0][1:]]
    is_deepspeed = name == "trainer"
    path = with_folder(CHECKOUT) if is_deepspeed else CHECKOUT
    wishes = Wishes(variables={"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, has_torch_env=is_deepspeed)
    with WorkerJob(words, 2, tmp_path, wishes=wishes) as job:
        for number, (_, config, expected) in enumerate(cases):
            task = Task(0, "trial", f"t{number}", str(tmp_path / f"t{number}"), config, first_step=2, last_step=3)
            found = job.run(task)
            if isinstance(expected, str):
                assert (found.status, found.reason.startswith(expected)) == ("error", True), found
                continue
            assert (found.status, found.reason) == ("ok", "")
            assert found.metrics["train_batch_size"] == expected
            assert 0 < found.metrics["fwd"] < found.metrics["latency"]
            assert found.metrics["activation_bytes"] > 0
    assert len(list(tmp_path.glob("job-*"))) == 1
    assert not list(saved.glob("*"))
