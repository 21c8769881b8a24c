"""Index files of metrics, as the analyzer writes them, made of the values of all samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder


def write_rows(path: Path, rows: Sequence[Any], dtype: object = np.int64) -> str:
    """Write rows of integers; returns the path without endings."""
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype)
    for row in rows:
        builder.add_item(np.asarray(row))
    builder.finalize(f"{path}.idx")
    return str(path)


def write_metric(folder: Path, name: str, values: Sequence[int]) -> dict[str, str]:
    """Write index_to_sample and index_to_metric; returns the keys of the metric in the config."""
    found = np.asarray(values)
    distinct = sorted(set(values))
    rows = [np.flatnonzero(found == value) for value in distinct]
    return {
        "index_to_sample_path": write_rows(folder / f"{name}_index_to_sample", rows),
        "index_to_metric_path": write_rows(folder / f"{name}_index_to_metric", [[value] for value in distinct]),
    }


def metric(
    paths: dict[str, str], levels: Sequence[int], last_steps: Sequence[int], kind: str = "value", **settings: Any
) -> dict[str, Any]:
    """The section of a metric whose difficulties are `levels`, each until its last step."""
    return {
        **paths,
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": levels[0],
        "max_difficulty": levels[-1],
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": list(levels), "max_step": list(last_steps)},
        **settings,
    }
