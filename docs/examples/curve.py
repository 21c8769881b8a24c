"""The loss curve of a run: a CSV file that survives restarts, and a picture of it."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Point:
    """What is known after a global step; losses are in nats per byte."""

    step: int
    samples: int
    ranks: int
    train_loss: float  # mean since the point before, over all ranks
    validation_loss: float


def read(path: Path, last_step: int | None = None) -> list[Point]:
    """The points of a file up to `last_step`; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        points = [
            Point(
                int(r["step"]), int(r["samples"]), int(r["ranks"]), float(r["train_loss"]), float(r["validation_loss"])
            )
            for r in csv.DictReader(file)
        ]
    return [point for point in points if last_step is None or point.step <= last_step]


def write(path: Path, points: list[Point]) -> None:
    """Replace the file by `points`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Point)], lineterminator="\n")
        rows.writeheader()
        rows.writerows(asdict(point) for point in points)


def draw(path: Path, points: list[Point]) -> None:
    """Draw training and validation loss; dotted lines stand where the number of ranks changed.

    Without matplotlib there is no picture, and a line says so.
    """
    try:
        import matplotlib as mpl  # an option, and slow to import
    except ImportError:
        print(f"no {path}: matplotlib is not installed (pip install matplotlib)", flush=True)
        return

    mpl.use("Agg")
    from matplotlib import pyplot

    steps = [point.step for point in points]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(steps, [point.train_loss for point in points], label="training", color="tab:gray", linewidth=1.2)
    axes.plot(steps, [point.validation_loss for point in points], label="validation", color="tab:blue", marker=".")
    for before, after in pairwise(points):
        if before.ranks != after.ranks:
            axes.axvline(before.step, color="tab:orange", linestyle=":")
            text = f"{before.ranks} to {after.ranks} ranks "
            axes.text(before.step, 0.97, text, transform=axes.get_xaxis_transform(), ha="right", va="top", fontsize=8)
    axes.set(xlabel="global step", ylabel="loss (nats per byte)", title="A byte-level GPT on the standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
