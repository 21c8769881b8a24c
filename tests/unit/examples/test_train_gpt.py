"""The training script as a user runs it, on one rank: train, resume, and the messages of mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import curve
import pytest
import torch

from mpispeed.config.load import parse, read_source
from mpispeed.plan.plan import make_plan

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
TINY = [
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "16",
    "--block",
    "32",
    "--eval_every",
    "2",
    "--sample",
    "8",
    "--cap_bytes",
    "50000",
]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *TINY, *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_config_is_valid_at_every_size_of_the_demo(ranks: int) -> None:
    content, where = read_source(str(EXAMPLES / "ds_config.json"))
    plan = make_plan(parse(content, where).config, ranks, torch.float32)
    assert plan.batch.micro_batch_size * plan.batch.gradient_accumulation_steps * ranks == 24
    assert json.loads(content)["zero_optimization"]["stage"] == plan.stage == 1


def without_tensorboard(folder: Path) -> list[str]:
    """Options for the same config without the sink that is slow to import."""
    config = json.loads((EXAMPLES / "ds_config.json").read_text())
    config["tensorboard"]["enabled"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return ["--deepspeed_config", "config.json"]


def test_train_resume_and_outputs(tmp_path: Path) -> None:
    first = run(tmp_path, "--deepspeed_config", str(EXAMPLES / "ds_config.json"), "--steps", "4")
    assert first.returncode == 0, first.stderr
    assert "step 4/4  validation loss" in first.stderr
    assert "what it writes after 4 steps ---\ndef " in first.stdout
    second = run(tmp_path, *without_tensorboard(tmp_path), "--steps", "6", "--resume", "--save_every", "5")
    assert second.returncode == 0, second.stderr
    points = curve.read(tmp_path / "runs/gpt/loss.csv")
    assert [(p.step, p.samples, p.ranks) for p in points] == [(2, 48, 1), (4, 96, 1), (6, 144, 1)]
    assert 4.5 < points[-1].validation_loss < points[0].validation_loss < 5.7
    saved = sorted(path.name for path in (tmp_path / "runs/gpt/checkpoints").iterdir())
    assert saved == ["global_step4", "global_step5", "global_step6", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "runs/gpt/loss.png").stat().st_size > 5000
    rows = (tmp_path / "runs/csv/gpt/Train_Samples_lr.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows[1:]] == [24, 48, 72, 96, 120, 144]
    assert list((tmp_path / "runs/tensorboard/gpt").glob("events.out.tfevents.*"))


def test_a_missing_config_is_one_line_and_code_2(tmp_path: Path) -> None:
    found = run(tmp_path, "--deepspeed_config", "nowhere.json")
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "nowhere.json" in found.stderr


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    found = run(tmp_path, *without_tensorboard(tmp_path), "--resume")
    assert found.returncode == 2
    assert "nothing to resume from in runs/gpt/checkpoints" in found.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--heads", "3"], "--width 16 is no multiple of 2 x --heads 3"),
        (["--cap_bytes", "20"], "--cap_bytes 20 leaves no window"),
        (["--out", "file/below"], "--out file/below cannot be made a folder"),
    ],
    ids=["heads", "cap_bytes", "out"],
)
def test_arguments_that_cannot_work_are_one_line_and_code_2(options: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run(tmp_path, *without_tensorboard(tmp_path), *options)
    assert found.returncode == 2
    assert [text in line for line in found.stderr.splitlines()] == [True]


def test_one_checkpoint_per_global_step(tmp_path: Path) -> None:
    options = without_tensorboard(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("train_micro_batch_size_per_gpu", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"gradient_accumulation_steps": 3}))
    found = run(tmp_path, *options, "--steps", "3", "--save_every", "1")
    assert found.returncode == 0, found.stderr
    saved = [line.split("/")[-1].split(" ")[0] for line in found.stderr.splitlines() if "INFO saved" in line]
    assert saved == ["global_step1", "global_step2", "global_step3"]
