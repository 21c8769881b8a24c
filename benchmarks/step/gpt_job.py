"""A job of the example GPT with changed settings, and what it wrote down."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples"


def example_settings(steps: int) -> dict[str, Any]:
    """The settings of the example for a run of so many steps, without monitors."""
    settings = json.loads((EXAMPLE / "ds_config.json").read_text(encoding="utf-8"))
    for monitor in ("csv_monitor", "tensorboard"):
        settings[monitor]["enabled"] = False
    settings["scheduler"]["params"]["total_num_steps"] = steps
    return settings


def train(
    settings: Mapping[str, Any], ranks: int, steps: int, folder: Path, *options: str, **environment: str
) -> list[dict[str, str]]:
    """Run `docs/examples/train_gpt.py` with `options` of its own; returns the rows of its loss.csv."""
    path = folder / "config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), str(EXAMPLE / "train_gpt.py")]
    own = ["--deepspeed_config", str(path), "--out", str(folder), "--steps", str(steps), "--sample", "0", *options]
    subprocess.run([*command, *own], check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    return read_csv(folder / "loss.csv")


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a table with a header."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curves(rows: Sequence[Mapping[str, str]], *names: str) -> dict[str, list[Any]]:
    """The steps of a loss.csv, and each of these columns along them."""
    return {"step": [int(row["step"]) for row in rows], **{name: [float(row[name]) for row in rows] for name in names}}
