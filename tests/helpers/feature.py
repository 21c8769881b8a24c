"""A row of the table of features: what it adds to a run, what it promises, how one sees that it was in effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from tests.helpers.pairs import Run

BATCH = 24
FINAL, CLOSE, EXACT = "runs", "near", "bits"
"""Promises about a pair: losses are finite; near those of the other feature alone; the same to the bit."""

PROMISES = (EXACT, CLOSE, FINAL)
"""From the strongest to the weakest."""

ANY, CUT, UP = (0, 1, 2, 3), (1, 2, 3), (3,)


Change = Callable[[dict[str, Any], Path], None]


@dataclass(frozen=True)
class Feature:
    """A row.

    Attributes:
        name: what the page calls it.
        words: what a sentence that refuses it may say: parts of texts in lower case.
        seen: True if a run had it in effect; asked on every rank before the engine is destroyed.
        change: edits the config; the folder is that of the run.
        stages: ZeRO stages at which it can be, best first.
        keeps: what it promises about the numbers of a run that has another feature.
        is_rounding: the run computes or sends in few bits, so that "near" is less near.
        by_micro_batch: it draws for each micro-batch, so that other micro-batches give other numbers.
        kind: an engine has one feature of a kind; others of it would replace it.
        axes: sizes of axes that it needs.
        client: makes the client's optimizer of the parameters.
        act: what a run does after two steps.
        saves: the run is saved after two steps, and another engine goes on.
        left: True if the files are there after the engine was destroyed; asked on rank 0.
    """

    name: str
    words: tuple[str, ...]
    seen: Callable[[Run], bool]
    change: Change = lambda settings, folder: None
    stages: tuple[int, ...] = ANY
    keeps: str = EXACT
    is_rounding: bool = False
    by_micro_batch: bool = False
    kind: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    client: Callable[[nn.Module, list[Any]], Any] | None = None
    act: Callable[[Run], None] | None = None
    saves: bool = False
    left: Callable[[Run], bool] = lambda run: True

    @property
    def makes_engines(self) -> bool:
        """True if a run makes a second engine."""
        return self.saves or self.name == "walltime"

    @property
    def key(self) -> str:
        """A short name for files and command lines."""
        return "".join(c if c.isalnum() else "-" for c in self.name.lower()).strip("-")


def put(path: str, value: Any) -> Change:
    """Set one key of the config, by its path; "FOLDER" stands for the folder of the run."""

    def change(settings: dict[str, Any], folder: Path) -> None:
        *sections, key = path.split(".")
        at = settings
        for section in sections:
            at = at.setdefault(section, {})
        given = json.loads(json.dumps(value).replace("FOLDER", str(folder)))
        is_joined = isinstance(given, dict) and isinstance(at.get(key), dict)  # two features may be parts of a section
        at[key] = at[key] | given if is_joined else given

    return change


def zero(key: str, value: Any) -> Change:
    return put(f"zero_optimization.{key}", value)


def together(*changes: Change) -> Change:
    def change(settings: dict[str, Any], folder: Path) -> None:
        for one in changes:
            one(settings, folder)

    return change
