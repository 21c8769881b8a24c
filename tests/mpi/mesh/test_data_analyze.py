"""`mpispeed data analyze` on several ranks: the files of one rank, columns, failures that all ranks share."""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.cli.data_analyze import analyze
from mpispeed.curriculum.index_file import MMapIndexedDataset
from mpispeed.curriculum.ordered_writes import write_index_files
from mpispeed.curriculum.sample_sort import Pairs
from mpispeed.curriculum.store_metrics import StoreSamples, lengths, rarities, whole_numbers
from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.store import open_store
from tests.helpers import analyzer_cases as cases
from tests.unit.tokens.conftest import make_store

pytestmark = pytest.mark.mpi(min_size=1)

MODULE = """
import torch
def held(batch):
    return batch["attention_mask"].sum(1) / 2
def fails(batch):
    raise KeyError(f"sample {int(batch['input_ids'][0, 0])}")
"""


@pytest.fixture
def folder(comm, monkeypatch):
    path = Path(comm.share(tempfile.mkdtemp() if comm.rank == 0 else None))
    if comm.rank == 0:
        make_store(path / "s.h5", documents=150, row_length=64, columns={"level": "i2"})
        (path / "own_metrics_of_test.py").write_text(MODULE)
    comm.barrier()
    monkeypatch.chdir(path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working folder
    yield path
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


def run(comm, *words):
    analyze.main(["s.h5", *map(str, words)], standalone_mode=False)
    comm.barrier()


def alone(folder, kind, length=None):
    """Index files of one rank, and values."""
    with open_store("s.h5") as store:
        samples = StoreSamples.of(store, kind, length)
        found = {
            "length": lengths(samples, 0, samples.count),
            "rarity": rarities(solo_comm(), samples, 0, samples.count),
        }
    for name, values in found.items():
        pairs = Pairs(whole_numbers(values, 100), np.arange(len(values)))
        write_index_files(solo_comm(), folder / name, name, pairs, len(values))
    return found


@pytest.mark.parametrize(("kind", "length"), [("documents", None), ("windows", 16), ("rows", None)])
def test_files_are_those_of_one_rank(comm, folder, kind, length):
    run(comm, "--out", "all", "--samples", kind, *([] if length is None else ["--length", length]))
    own = folder / f"alone{comm.rank}"
    values = alone(own, kind, length)
    assert cases.sums(folder / "all") == cases.sums(own)
    shortest = MMapIndexedDataset("all/length/length_index_to_metric")[0]
    assert shortest.tolist() == [values["length"].min()]


def test_columns_and_their_index_files(comm, folder):
    run(comm, "--add-columns")
    run(comm, "--out", "all", "-m", "column:rarity", "-m", "column:level")
    values = alone(folder / f"alone{comm.rank}", "documents")
    with open_store("s.h5") as store:
        assert store.columns == {"level": "i2", "length": "i8", "rarity": "f8"}
        for name, wanted in values.items():
            assert np.array_equal(store.column(name), wanted)
        levels = store.column("level")
    assert cases.sums(folder / "all/rarity") == cases.sums(folder / f"alone{comm.rank}" / "rarity")
    assert [int(row[0]) for row in MMapIndexedDataset("all/level/level_sample_to_metric")] == levels.tolist()
    with pytest.raises(UsageError, match=r"column 'length': .* has a column length already"):
        run(comm, "--add-columns")


def test_functions_of_batches(comm, folder):
    run(comm, "--out", "all", "-m", "half=own_metrics_of_test:held", "--length", 20, "--scale", 10, "--batch-size", 9)
    with open_store("s.h5") as store:
        wanted = np.minimum(lengths(StoreSamples.of(store, "documents"), 0, 150), 20) * 5
    assert [int(row[0]) for row in MMapIndexedDataset("all/half/half_sample_to_metric")] == wanted.tolist()
    with pytest.raises(UsageError, match="metric 'm': KeyError"):
        run(comm, "--out", "all", "-m", "m=own_metrics_of_test:fails", "--length", 20)
    with pytest.raises(UsageError, match="give the length"):
        run(comm, "--out", "all", "-m", "m=own_metrics_of_test:held")
    with pytest.raises(UsageError, match="cannot be imported as MODULE:FUNCTION"):
        run(comm, "--out", "all", "-m", "m=own_metrics_of_test:no_such", "--length", 20)


def test_questions_that_do_not_fit(comm, folder):
    for words, text in (
        ([], "say what is to be made"),
        (["--out", "all", "-m", "loss"], "'loss' is none of length, rarity"),
        (["--out", "all", "-m", "../x=a:b"], "is no name"),
        (["--add-columns", "--samples", "rows"], "for all documents of a store"),
    ):
        with pytest.raises(ConfigError, match=text):
            run(comm, *words)
    with pytest.raises(UsageError, match="a value for each document"):
        run(comm, "--out", "all", "--samples", "rows", "-m", "column:level")
    with pytest.raises(UsageError, match="has no column 'none'"):
        run(comm, "--out", "all", "-m", "column:none")
    with pytest.raises(TokenStoreError, match=r"t\.h5"):
        analyze.main(["t.h5", "--out", "all"], standalone_mode=False)
