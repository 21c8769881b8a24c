"""A column is there whole or not at all, wherever the program that adds it is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpispeed.tokens import columns, link_room
from mpispeed.tokens.columns import add_column
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.layout import COLUMN_DTYPES, MOST_COLUMNS
from mpispeed.tokens.store import open_store
from mpispeed.tokens.verify import verify

SEED = 11


def check_store(made: Any, present: dict[str, np.ndarray]) -> None:
    """All that was there is there, for this library and for any tool; columns are those that are given."""
    with open_store(made.path) as store:
        assert np.array_equal(store.read(0, store.token_count).numpy(), made.tokens)
        assert set(store.columns) == set(present)
        for name, values in present.items():
            assert np.array_equal(store.column(name), values)
    assert verify(made.path).problems == []
    with h5py.File(made.path) as file:
        assert np.array_equal(file["tokens"][()], made.tokens)
        assert np.array_equal(file["documents"][()], made.begins)
        assert {name: file["columns"][name]["values"][()].tolist() for name in file["columns"]} == {
            name: values.tolist() for name, values in present.items()
        }


def test_as_many_columns_as_there_is_room_for(make: Callable[..., Any]) -> None:
    made = make(columns={"first": "f4"})
    present = dict(made.columns)
    for number in range(1, MOST_COLUMNS):
        name = f"{number:02}" + "x" * 54
        present[name] = np.arange(50).astype(COLUMN_DTYPES[number % len(COLUMN_DTYPES)])
        add_column(made.path, name, present[name], facts={"number": number})
    check_store(made, present)
    with pytest.raises(TokenStoreError, match="no room for more"):
        add_column(made.path, "another", np.arange(50))


def test_values_may_come_in_pieces(make: Callable[..., Any]) -> None:
    made, values = make(documents=2_000_000, longest=1), np.random.default_rng(1).random(2_000_000)
    add_column(
        made.path, "loss", (values[first : first + 300_000] for first in range(0, len(values), 300_000)), dtype="f8"
    )
    check_store(made, {"loss": values})  # of several blocks


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"values": np.arange(49)}, "has 49 values; it must have 50"),
        ({"values": np.arange(51)}, "more than the 50 values"),
        ({"values": np.arange(50) * 10, "dtype": "u1"}, "cannot hold"),
        ({"name": "length"}, "has a column length already"),
        ({"name": "a/b"}, "cannot name a column"),
        ({"values": [np.arange(50)]}, "needs a dtype"),
        ({"facts": {"x": "y" * 5000}}, "leave some out"),
    ],
)
def test_what_cannot_be_added_leaves_the_store_as_it_was(
    make: Callable[..., Any], asked: dict[str, Any], said: str
) -> None:
    made = make(columns={"length": "u2"})
    before = made.path.read_bytes()
    with pytest.raises(TokenStoreError, match=said):
        add_column(made.path, **{"name": "x", "values": np.arange(50), **asked})
    assert made.path.read_bytes() == before


def test_two_programs_do_not_add_at_once(make: Callable[..., Any]) -> None:
    made = make()

    def values() -> Iterator[np.ndarray]:
        with pytest.raises(TokenStoreError, match="another program"):
            add_column(made.path, "second", np.arange(50))
        yield np.arange(50)

    add_column(made.path, "first", values(), dtype="i8")
    check_store(made, {"first": np.arange(50)})


def test_without_the_library_of_h5py_a_column_that_has_no_room_is_refused(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_room, "_library", lambda: None)
    made, present = make(), {}
    with pytest.raises(TokenStoreError, match="no room for another column in its first"):
        for number in range(MOST_COLUMNS):
            add_column(made.path, f"column_{number}", np.arange(50))
            present[f"column_{number}"] = np.arange(50)
    check_store(made, present)


def child_killed_at_write(path: Path, name: str, number: int) -> bool:
    """Add a column in a fork that ends without a word before its write of this number; False if it came to the end."""
    child = os.fork()
    if not child:
        try:
            left, write = number, columns.write_at

            def write_at(*args: Any) -> None:
                nonlocal left
                if not left:
                    os._exit(9)
                left -= 1
                write(*args)

            columns.write_at = write_at
            add_column(path, name, iter([np.arange(20), np.arange(20, 50)]), dtype="u2")
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def test_an_end_before_any_write_leaves_the_store_without_the_column(make: Callable[..., Any]) -> None:
    made, number = make(), 0
    present: dict[str, np.ndarray] = {}
    while child_killed_at_write(made.path, "values", number):
        check_store(made, present)
        if number % 2:  # what a try has left does not harm another one
            present[f"own_{number}"] = np.arange(50)
            add_column(made.path, f"own_{number}", present[f"own_{number}"])
        number += 1
    assert number > 5
    check_store(made, {**present, "values": np.arange(50)})


def test_a_kill_at_any_time_leaves_all_or_nothing(make: Callable[..., Any]) -> None:
    made, dice = make(documents=200_000, longest=2), random.Random(SEED)
    values, present = np.arange(200_000), {}
    ended = 0
    for number in range(MOST_COLUMNS):
        name = f"column_{number}"
        child = os.fork()
        if not child:
            add_column(made.path, name, np.array_split(values, 50), dtype="u4")
            os._exit(0)
        time.sleep(dice.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        ended += os.waitpid(child, 0)[1] == signal.SIGKILL
        with open_store(made.path) as store:
            if name in store.columns:
                present[name] = values
    assert ended
    check_store(made, present)


def test_a_reader_may_open_the_store_while_columns_are_added(make: Callable[..., Any]) -> None:
    made = make()
    child = os.fork()
    if not child:
        try:
            for number in range(MOST_COLUMNS):
                add_column(made.path, f"column_{number}", np.arange(50))
        finally:
            os._exit(0)
    counts = [0]
    while not os.waitpid(child, os.WNOHANG)[0]:
        with open_store(made.path) as store:
            for name in store.columns:
                assert np.array_equal(store.column(name), np.arange(50))
            counts.append(len(store.columns))
    assert counts == sorted(counts)
    with open_store(made.path) as store:
        assert len(store.columns) == MOST_COLUMNS
