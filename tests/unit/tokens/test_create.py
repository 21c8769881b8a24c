"""A new store: what is laid out, written by position and completed, as any tool for HDF5 sees it."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from mpispeed.native.checksum import crc32c
from mpispeed.tokens import layout
from mpispeed.tokens.create import StoreWriter, create, finish
from mpispeed.tokens.errors import TokenStoreError


def test_a_finished_store_is_a_plain_file_of_hdf5(tmp_path: Path) -> None:
    path, dice = tmp_path / "store.h5", np.random.default_rng(3)
    tokens, documents = 50_000, 300
    ids = dice.integers(0, 1 << 16, tokens)
    begins = np.concatenate([[0], np.sort(dice.choice(np.arange(1, tokens), documents - 1, replace=False)), [tokens]])
    rows, lengths = np.array([0, 10, 100, documents]), np.diff(begins)
    places = create(
        path, tokens=tokens, documents=documents, dtype="u2", rows=3, columns={"length": "u4"}, facts={"eos": 7}
    )
    with h5py.File(path) as file:
        assert b'"complete": false' in file["manifest"][()]
    with StoreWriter(path, places) as writer:
        for first in (20_000, 0):  # in any order
            writer.put("tokens", first, ids[first : first + 30_000])
        writer.put("documents", 0, begins)
        writer.put("rows", 0, rows)
        writer.put("columns/length", 0, lengths)
        writer.put_lookup(5, places.tables["lookup"].count)
        writer.put_lookup(0, 5)
        for name, place in places.tables.items():
            writer.put_checksums(name, 0, place.block_count)
    finish(path, places, {"source": "test"})
    with h5py.File(path) as file:
        stored = {name: file[name][()] for name in ("tokens", "documents", "rows", "lookup")}
        assert np.array_equal(stored["tokens"], ids)
        assert np.array_equal(stored["documents"], begins)
        assert np.array_equal(stored["rows"], rows)
        assert np.array_equal(file["columns/length/values"][()], lengths)
        marks = np.arange(0, tokens, layout.LOOKUP_TOKENS)
        assert np.array_equal(stored["lookup"], np.searchsorted(begins, marks, side="right") - 1)
        assert file["checksums/tokens"][()].tolist() == [crc32c(stored["tokens"])]
        found = layout.read_manifest(file["manifest"][()].ljust(layout.MANIFEST_BYTES))
    assert found is not None
    assert found.is_complete
    assert found.facts == {"eos": 7, "source": "test"}
    assert found.sizes["tokens"] == tokens


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tokens": 3, "documents": 4}, "each has a token"),
        ({"dtype": "i8"}, "dtype"),
        ({"rows": 11}, "packed into 11 rows"),
        ({"columns": {"../x": "u1"}}, "cannot name a column"),
        ({"columns": {"x": "u3"}}, "dtype 'u3'"),
        ({"columns": {f"x{number}": "u1" for number in range(33)}}, "33 columns"),
        ({"facts": {"long": "x" * 70_000}}, "leave some out"),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_file(tmp_path: Path, asked: dict, said: str) -> None:
    path = tmp_path / "store.h5"
    with pytest.raises(TokenStoreError, match=said):
        create(path, **{"tokens": 100, "documents": 10, "dtype": "u2", **asked})
    assert not path.exists()


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.h5"
    places = create(path, tokens=100, documents=10, dtype="u2")
    with StoreWriter(path, places) as writer:
        with pytest.raises(TokenStoreError, match="cannot hold"):
            writer.put("tokens", 0, np.array([65536]))
        with pytest.raises(TokenStoreError, match="has 100"):
            writer.put("tokens", 99, np.array([1, 2]))
    with pytest.raises(TokenStoreError, match="it must be from 0 to 100"):
        finish(path, places)
