"""Damage is found: by `verify` in every block, and single flipped bits anywhere end in a sentence."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpispeed.base.errors import MpispeedError
from mpispeed.tokens.columns import add_column
from mpispeed.tokens.create import StoreWriter
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.reader import open_file, read_contents
from mpispeed.tokens.store import open_store
from mpispeed.tokens.verify import verify
from mpispeed.tokens.windows import TokenWindows

SEED, FLIPS = 5, 200


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 1 << bit]))


def test_every_table_is_checked_block_by_block(make: Callable[..., Any]) -> None:
    made = make(documents=700_000, longest=9, columns={"loss": "f8"}, row_length=64)
    found = verify(made.path)
    assert found.is_fine
    assert found.blocks == found.all_blocks > 6
    handle = open_file(made.path)
    places = read_contents(made.path, handle).places
    os.close(handle)
    for table, place in places.tables.items():
        last = place.block_count - 1
        offset, nbytes = place.block(last)
        flip(made.path, offset + nbytes - 1, 3)
        found = verify(made.path, threads=3)
        assert len(found.problems) == 1
        begin = last * (4 << 20) // place.itemsize
        assert found.problems[0].startswith(f"elements {begin} to {place.count} of /{table} are damaged")
        flip(made.path, offset + nbytes - 1, 3)
        own = places.lists[table]
        flip(made.path, own.offset, 0)
        assert verify(made.path).problems == [
            f"the checksums of /{table} do not have the checksum that the manifest gives them"
        ]
        flip(made.path, own.offset, 0)
    some = verify(made.path, sample=3)
    assert some.is_fine
    assert (some.blocks, some.all_blocks) == (3, found.all_blocks)


def wrong_store(make: Callable[..., Any], table: str, first: int, values: list[int]) -> Path:
    """A store whose writer wrote something wrong, with right checksums."""
    from mpispeed.tokens.create import finish

    made = make(documents=200, row_length=128)
    handle = open_file(made.path)
    places = read_contents(made.path, handle).places
    os.close(handle)
    with StoreWriter(made.path, places) as writer:
        writer.put(table, first, np.array(values))
        writer.put_checksums(table, 0, places.tables[table].block_count)
    finish(made.path, places, {"vocabulary_size": 65530})
    return made.path


@pytest.mark.parametrize(
    ("table", "first", "values", "said"),
    [
        ("tokens", 5, [65531], "have the token 6553., and the vocabulary has 65530"),
        ("documents", 7, [0], "/documents do not increase"),
        ("rows", 2, [0], "/rows do not increase"),
        ("lookup", 1, [0], "/lookup are not the documents"),
    ],
)
def test_tables_are_compared_with_each_other(
    make: Callable[..., Any], table: str, first: int, values: list[int], said: str
) -> None:
    import re

    problems = verify(wrong_store(make, table, first, values)).problems
    assert any(re.search(said, problem) for problem in problems)


def test_documents_that_end_before_the_tokens_do_not_keep_a_check_for_ever(make: Callable[..., Any]) -> None:
    made = make(documents=1, longest=30_000)
    handle = open_file(made.path)
    places = read_contents(made.path, handle).places
    os.close(handle)
    with StoreWriter(made.path, places) as writer:
        writer.put("documents", 1, np.array([4096]))
    problems = verify(made.path).problems
    assert "/documents are damaged" in problems[0]
    assert "/documents is damaged: document 0 is to have token 4096" in problems[1]


def read_all(path: Path) -> Any:
    with open_store(path) as store:
        windows = TokenWindows(store, 32, documents=True).read_batch(range(40))
        rows = TokenRows(store).read_batch(range(20))
        parts = [*windows.values(), *rows.values()]
        return [part.numpy().tobytes() for part in parts], store.column("loss").tobytes(), dict(store.facts)


def test_single_bits_end_in_a_sentence_and_never_in_other_data_unseen(make: Callable[..., Any]) -> None:
    made = make(documents=300, longest=32, row_length=64)
    add_column(made.path, "loss", np.random.default_rng(2).random(300))
    good, size, dice = read_all(made.path), made.path.stat().st_size, random.Random(SEED)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = refused = 0
    for number in range(FLIPS):
        # where the headers of HDF5 are in half of the cases
        place, bit = dice.randrange(4096 if number % 4 == 0 else size), dice.randrange(8)
        if number % 4 == 1:
            place = size - 1 - dice.randrange(8192)
        flip(made.path, place, bit)
        told = ""
        try:
            told = " ".join(verify(made.path, threads=1).problems)
        except MpispeedError as failure:
            told = str(failure)
            refused += 1
        try:
            seen = read_all(made.path)
        except MpispeedError as failure:
            assert told, f"bit {bit} of byte {place}: read {failure}, verified without a word"
            assert "\n" not in str(failure)
        else:
            assert seen == good or told, f"bit {bit} of byte {place}: other data, unseen"
        found += bool(told)
        flip(made.path, place, bit)
    assert read_all(made.path) == good
    assert found > FLIPS // 8
    assert refused > FLIPS // 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 500 << 10  # KiB
