"""A store of 10**9 documents: what opening it and reading from it takes does not grow with it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpispeed.data import SampleOrder
from mpispeed.tokens.create import StoreWriter, create, finish
from mpispeed.tokens.layout import LOOKUP_TOKENS, Place

DOCUMENTS, EACH, LENGTH, BATCH = 10**9, 64, 2048, 8
TOKENS = DOCUMENTS * EACH
FIRST = 1000
"""Samples from here on are read a second time, with counts of bytes."""


def numbers() -> list[int]:
    """Of the samples that are read."""
    return [
        *SampleOrder((TOKENS - 1) // LENGTH, 3, shuffle=True).indices(range(BATCH)),
        7,
        *range(FIRST, FIRST + BATCH),
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sparse file in which only what is read has been written."""
    path = tmp_path_factory.mktemp("large") / "store.h5"
    places = create(path, tokens=TOKENS, documents=DOCUMENTS, dtype="u2", is_reserved=False)
    with StoreWriter(path, places) as writer:
        writer.put("documents", DOCUMENTS, np.array([TOKENS]))
        writer.put("documents", 0, np.array([0, EACH]))
        writer.put("documents", DOCUMENTS - 1, np.array([TOKENS - EACH]))
        for number in numbers():
            start = number * LENGTH
            writer.put("tokens", start, np.arange(LENGTH + 1) % 1000)
            marks = np.arange(start // LOOKUP_TOKENS, (start + LENGTH) // LOOKUP_TOKENS + 2)
            writer.put("lookup", int(marks[0]), marks * LOOKUP_TOKENS // EACH)
            around = np.arange(marks[0] * LOOKUP_TOKENS // EACH, marks[-1] * LOOKUP_TOKENS // EACH + 2)
            writer.put("documents", int(around[0]), around * EACH)
    finish(path, places)
    assert path.stat().st_size > 130e9
    assert path.stat().st_blocks * 512 < 8 << 20
    yield path
    path.unlink()


def measured(path: Path, kind: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.tokens.large_store", str(path), str(LENGTH), str(BATCH), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    found: dict[str, Any] = json.loads(done.stdout)
    print(found)  # noqa: T201
    return found


def test_opening_and_a_first_batch_take_no_memory_and_samples_no_more_bytes_than_they_have(path: Path) -> None:
    found = measured(path, "plain")
    assert found["samples"] == (TOKENS - 1) // LENGTH
    row = sum(number % 1000 for number in range(LENGTH))
    labels = sum(number % 1000 for number in range(1, LENGTH + 1))
    assert found["sums"] == [BATCH * row, BATCH * labels]
    assert found["more_kib"] < 200 << 10
    nbytes = BATCH * (LENGTH + 1) * 2
    assert found["read_by_calls"] == nbytes
    # each sample lies in two pages, of which neighbours share one; nothing where the file system is memory
    assert found["read_from_disk"] <= 2 * BATCH * 4096


def test_documents_are_looked_up_by_two_short_reads_a_sample(path: Path) -> None:
    found = measured(path, "documents")
    positions = np.arange(LENGTH) % EACH
    assert found["sums"][2] == BATCH * positions.sum()
    assert found["more_kib"] < 200 << 10
    most = BATCH * ((LENGTH + 1) * 2 + 2 * 8 + (LENGTH + 2 * LOOKUP_TOKENS) // EACH * 8 + 3 * 8)
    assert BATCH * (LENGTH + 1) * 2 < found["read_by_calls"] <= most


def test_places_are_counted_in_64_bits() -> None:
    place = Place(4096, 1 << 50, "u4")
    assert place.block(place.block_count - 1) == (4096 + (1 << 52) - (4 << 20), 4 << 20)
