"""Metrics of documents, windows and rows of token stores, against plain loops over what was put into them."""

from collections import Counter
from itertools import pairwise
from math import log

import numpy as np
import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum import store_metrics
from mpispeed.curriculum.store_columns import add_to_store
from mpispeed.curriculum.store_metrics import StoreSamples, called, column_values, lengths, rarities, whole_numbers
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.mesh.sim import run
from mpispeed.tokens.store import open_store
from tests.unit.tokens.conftest import make_store

KINDS = {
    "documents": {},
    "windows": {"length": 7},
    "windows of a part": {"length": 7, "split": (1, 3), "part": 1, "labels": "same"},
    "documents of a part": {"split": (1, 1, 1), "part": 1},
    "rows": {},
    "rows of a part": {"split": (2, 1), "part": 0},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_store(
        tmp_path_factory.mktemp("store") / "s.h5", documents=200, row_length=64, columns={"hard": "f8", "level": "i2"},
        dtype="u2",
    )  # fmt: skip


def expected(made, name, samples):
    """Tokens of each sample."""
    if name.startswith("windows"):
        whole = np.concatenate(made.documents[50:]) if "part" in name else made.tokens
        return [whole[i : i + 7] for i in range(0, 7 * samples.count, 7)]
    if name.startswith("rows"):
        bounds = [made.begins[row] for row in made.rows]
        return [made.tokens[a:b] for a, b in pairwise(bounds)][: samples.count]
    return made.documents[67:134] if "part" in name else made.documents


@pytest.mark.parametrize("name", KINDS)
def test_lengths_and_rarities(made, name, monkeypatch):
    monkeypatch.setattr(store_metrics, "_SAMPLES", 11)
    monkeypatch.setattr(store_metrics, "_TOKENS", 23)  # documents are longer
    with open_store(made.path) as store:
        samples = StoreSamples.of(store, name.split()[0], **KINDS[name])
        wanted = expected(made, name, samples)
        assert samples.count == len(wanted)
        assert lengths(samples, 0, samples.count).tolist() == [len(tokens) for tokens in wanted]
        assert lengths(samples, 3, 3).tolist() == []
        found = rarities(solo_comm(), samples, 0, samples.count)
    counts = Counter(token for tokens in wanted for token in tokens.tolist())
    total = sum(counts.values())
    plain = [-sum(log(counts[token] / total) for token in tokens.tolist()) for tokens in wanted]
    # each token's share is rounded to 2^-24
    assert np.abs(found - plain).max() <= 64 * 2.0**-24
    assert np.array_equal(found * 2**24, np.rint(found * 2**24))


def test_functions_and_columns(made):
    with open_store(made.path) as store:
        samples = StoreSamples.of(store, "documents", 9, split=(1, 1), part=1)
        found = called(samples, lambda batch: batch["attention_mask"].sum(1), "held", 2, 50, 16)
        assert found.tolist() == [min(9, len(tokens)) for tokens in made.documents[102:150]]
        found = called(samples, lambda batch: batch["input_ids"][:, :1].double().numpy() / 2, "half", 0, 3, 2)
        assert found.tolist() == [tokens[0] / 2 for tokens in made.documents[100:103]]
        assert column_values(samples, "hard", 0, 100).tolist() == made.columns["hard"][100:].tolist()
        with pytest.raises(UsageError, match=r"'m': float32 of shape \[2, 9\] came for samples 0 to 1"):
            called(samples, lambda batch: batch["input_ids"].float(), "m", 0, 3, 2)
        with pytest.raises(ConfigError, match="give the length"):
            called(StoreSamples.of(store, "documents"), len, "m", 0, 3, 2)
        with pytest.raises(ConfigError, match="metric of windows"):
            column_values(StoreSamples.of(store, "windows", 9), "hard", 0, 1)
        with pytest.raises(ConfigError, match="windows need a length"):
            StoreSamples.of(store, "windows")


def test_whole_numbers():
    assert whole_numbers(np.array([3, 250], np.uint8), 100).tolist() == [3, 250]
    assert whole_numbers(np.array([1.234, -0.006, 0.004], np.float32), 100).tolist() == [123, -1, 0]
    for bad in (np.nan, np.inf, 1e18):
        with pytest.raises(UsageError, match="do not fit integers"):
            whole_numbers(np.array([1.0, bad]), 100)


def test_a_vocabulary_that_the_store_does_not_have(tmp_path):
    made = make_store(tmp_path / "s.h5", dtype="u4", facts={"vocabulary_size": 100})
    with open_store(made.path) as store, pytest.raises(UsageError, match="is not in its vocabulary of 100"):
        rarities(solo_comm(), StoreSamples.of(store, "documents"), 0, 50)
    made = make_store(tmp_path / "t.h5", dtype="u4", facts={"vocabulary_size": 1 << 30})
    with open_store(made.path) as store, pytest.raises(UsageError, match="vocabulary of 1073741824; rarity is for"):
        rarities(solo_comm(), StoreSamples.of(store, "documents"), 0, 50)


def test_a_column_holds_what_any_rank_has(tmp_path):
    made, values = make_store(tmp_path / "s.h5", documents=4), (np.array([1, 2]), np.array([0.5, 2.25]))
    run(2, lambda world: add_to_store(world.comm, made.path, "hard", values[world.rank]))
    with open_store(made.path) as store:
        assert store.columns["hard"] == "f8"
        assert store.column("hard").tolist() == [1, 2, 0.5, 2.25]
