"""Small stores, and what is in them as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpispeed.tokens.create import StoreWriter, create, finish


@dataclass(frozen=True)
class Made:
    """A store, and what was put into it."""

    path: Path
    tokens: np.ndarray
    begins: np.ndarray
    rows: np.ndarray | None
    columns: dict[str, np.ndarray]

    @property
    def documents(self) -> list[np.ndarray]:
        return np.split(self.tokens, self.begins[1:-1])


def make_store(
    path: Path,
    *,
    documents: int = 50,
    longest: int = 60,
    dtype: str = "u2",
    row_length: int | None = None,
    columns: dict[str, str] | None = None,
    facts: dict[str, Any] | None = None,
    seed: int = 0,
) -> Made:
    """Write a store of random documents; rows take as many documents as fit."""
    dice = np.random.default_rng(seed)
    lengths = dice.integers(1, longest + 1, documents)
    begins = np.concatenate([[0], lengths.cumsum()])
    tokens = dice.integers(0, 1 << (8 * int(dtype[1:])), begins[-1], dtype=np.uint64)
    rows = None
    if row_length is not None:
        starts = [0]
        for number in range(documents):
            if begins[number + 1] - begins[starts[-1]] > row_length:
                starts.append(number)
        rows = np.array([*starts, documents])
    found = {name: dice.integers(0, 100, documents).astype(kind) for name, kind in (columns or {}).items()}
    told = {"eos": 1, "vocabulary_size": 1 << (8 * int(dtype[1:]))} | (facts or {})
    if row_length is not None:
        told["row_length"] = row_length
    places = create(
        path,
        tokens=len(tokens),
        documents=documents,
        dtype=dtype,
        rows=None if rows is None else len(rows) - 1,
        columns=columns,
        facts=told,
    )
    with StoreWriter(path, places) as writer:
        writer.put("tokens", 0, tokens)
        writer.put("documents", 0, begins)
        if rows is not None:
            writer.put("rows", 0, rows)
        for name, values in found.items():
            writer.put(f"columns/{name}", 0, values)
        writer.put_lookup(0, places.tables["lookup"].count)
        for name, place in places.tables.items():
            writer.put_checksums(name, 0, place.block_count)
    finish(path, places)
    return Made(path, tokens.astype(np.int64), begins, rows, found)
