"""Samples of a store against the same cut out of arrays."""

from __future__ import annotations

import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from mpispeed.base.errors import ConfigError
from mpispeed.tokens.blend import BLOCK, TokenBlend
from mpispeed.tokens.documents import TokenDocuments
from mpispeed.tokens.errors import TokenStoreError
from mpispeed.tokens.masks import document_mask, sequence_ends
from mpispeed.tokens.packed import TokenRows
from mpispeed.tokens.samples import BatchedSamples
from mpispeed.tokens.store import TokenStore, open_store
from mpispeed.tokens.windows import TokenWindows

LENGTH = 16


def padded(values: np.ndarray, length: int, fill: int) -> list[int]:
    return [*values[:length].tolist(), *[fill] * (length - len(values))]


def documents_of(made: Any, start: int, length: int) -> tuple[list[int], list[int]]:
    """Positions and numbers of documents of so many tokens."""
    owner = np.searchsorted(made.begins, np.arange(start, start + length), side="right")
    positions = [0]
    for before, now in itertools.pairwise(owner):
        positions.append(positions[-1] + 1 if before == now else 0)
    return positions, (owner - owner[0]).tolist()


@pytest.mark.parametrize("labels", ["next", "same", "none"])
@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_windows(make: Any, labels: Any, dtype: str) -> None:
    made = make(dtype=dtype)
    with open_store(made.path) as store:
        samples = TokenWindows(store, LENGTH, labels=labels)
        assert len(samples) == (len(made.tokens) - (labels == "next")) // LENGTH
        batch = samples.read_batch(range(len(samples)))
        for number in range(len(samples)):
            here = made.tokens[number * LENGTH : (number + 1) * LENGTH + 1]
            assert batch["input_ids"][number].tolist() == here[:LENGTH].tolist()
            if labels == "next":
                assert batch["labels"][number].tolist() == here[1:].tolist()
            elif labels == "same":
                assert batch["labels"][number].tolist() == here[:LENGTH].tolist()
        assert set(batch) == ({"input_ids"} if labels == "none" else {"input_ids", "labels"})
        assert all(rows.dtype == torch.int64 for rows in batch.values())


@pytest.mark.parametrize("labels", ["next", "same", "none"])
def test_windows_tell_documents_apart(make: Any, labels: Any) -> None:
    made = make(documents=1500, longest=30)  # several entries of the lookup
    with open_store(made.path) as store:
        samples = TokenWindows(store, LENGTH, labels=labels, documents=True)
        batch = samples.read_batch(range(len(samples)))
        for number in range(len(samples)):
            positions, owners = documents_of(made, number * LENGTH, LENGTH + 1)
            assert batch["position_ids"][number].tolist() == positions[:LENGTH]
            assert batch["document_ids"][number].tolist() == owners[:LENGTH]
            here = made.tokens[number * LENGTH : (number + 1) * LENGTH + 1].tolist()
            crosses = [now != before for before, now in itertools.pairwise(owners)]
            if labels == "next":
                wanted = [-100 if crossing else token for token, crossing in zip(here[1:], crosses, strict=True)]
                assert batch["labels"][number].tolist() == wanted
            elif labels == "same":
                wanted = [-100 if crossing else token for token, crossing in zip(here[1:], crosses, strict=True)]
                assert batch["labels"][number].tolist() == [here[0], *wanted[:-1]]


def test_parts_of_a_split_share_no_document_and_leave_none_out(make: Any) -> None:
    made, weights = make(documents=200), (90, 9, 1)
    with open_store(made.path) as store:
        parts = [TokenDocuments(store, 60, split=weights, part=part, labels="none") for part in range(3)]
        assert [len(part) for part in parts] == [180, 18, 2]
        found = [
            sample["input_ids"][: int(sample["attention_mask"].sum())].tolist() for part in parts for sample in part
        ]
        assert found == [document.tolist() for document in made.documents]
        first = TokenWindows(store, 1, split=weights, part=1, labels="none")
        assert len(first) == made.begins[198] - made.begins[180]
        assert first[0]["input_ids"].item() == made.tokens[made.begins[180]]
        with pytest.raises(ConfigError, match="no part 3"):
            TokenWindows(store, 1, split=weights, part=3)
        with pytest.raises(ConfigError, match="too few"):
            TokenWindows(store, 1000, split=weights, part=2)


@pytest.mark.parametrize("labels", ["next", "same", "none"])
def test_documents(make: Any, labels: Any) -> None:
    made = make(longest=2 * LENGTH)
    with open_store(made.path) as store:
        samples = TokenDocuments(store, LENGTH, labels=labels)
        for sample, document in zip(samples, made.documents, strict=True):
            assert sample["input_ids"].tolist() == padded(document, LENGTH, 1)
            held = min(LENGTH, len(document))
            assert sample["attention_mask"].tolist() == [1] * held + [0] * (LENGTH - held)
            if labels != "none":
                assert sample["labels"].tolist() == padded(document[labels == "next" :], LENGTH, -100)


@pytest.mark.parametrize("labels", ["next", "same", "none"])
def test_rows(make: Any, labels: Any) -> None:
    made = make(row_length=64)
    with open_store(made.path) as store:
        samples = TokenRows(store, labels=labels)
        batch = samples.read_batch(range(len(samples)))
        assert len(samples) == len(made.rows) - 1
        for number in range(len(samples)):
            inside = made.documents[made.rows[number] : made.rows[number + 1]]
            left = 64 - sum(map(len, inside))
            parts = [*inside, np.ones(left, np.int64)]
            assert batch["input_ids"][number].tolist() == np.concatenate(parts).tolist()
            assert batch["position_ids"][number].tolist() == [place for part in parts for place in range(len(part))]
            numbers = [owner for owner, part in enumerate(parts) for _ in part]
            assert batch["document_ids"][number].tolist() == numbers
            if labels == "next":
                wanted = [token for part in inside for token in (*part[1:].tolist(), -100)]
                assert batch["labels"][number].tolist() == wanted + [-100] * left
            elif labels == "same":
                wanted = [token for part in inside for token in (-100, *part[1:].tolist())]
                wanted[0] = int(inside[0][0])
                assert batch["labels"][number].tolist() == wanted + [-100] * left


def test_a_row_is_the_same_in_any_batch(make: Any) -> None:
    made = make(documents=60, longest=12, row_length=32)
    with open_store(made.path) as store:
        for length in (32, 64):  # of the longer ones several are nearer to the end of the store than their length
            samples = TokenRows(store, length)
            whole = samples.read_batch(range(len(samples)))
            for number in range(len(samples)):
                for name, values in samples[number].items():
                    assert torch.equal(values, whole[name][number])


def test_a_store_without_rows_says_so(make: Any) -> None:
    with open_store(make().path) as store, pytest.raises(ConfigError, match="--pack"):
        TokenRows(store)


def test_masks(make: Any) -> None:
    made = make(row_length=64)
    with open_store(made.path) as store:
        batch = TokenRows(store).read_batch(range(3))
    mask = document_mask(batch["document_ids"])
    assert mask.shape == (3, 1, 64, 64)
    for row in range(3):
        owners = batch["document_ids"][row].tolist()
        for i in range(64):
            assert mask[row, 0, i].tolist() == [j <= i and owners[i] == owners[j] for j in range(64)]
    ends, longest = sequence_ends(batch["position_ids"])
    lengths = [owners.count(number) for owners in batch["document_ids"].tolist() for number in sorted(set(owners))]
    assert ends.diff().tolist() == lengths
    assert longest == max(lengths)
    assert ends.dtype == torch.int32


class Counted(BatchedSamples):
    """Samples that are their own numbers, and how many reads there were."""

    def __init__(self, length: int, name: int) -> None:
        self.length, self.name, self.reads = length, name, 0

    def __len__(self) -> int:
        return self.length

    def _read(self, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        self.reads += 1
        return {"input_ids": torch.from_numpy(numbers)[:, None] * 10 + self.name}


def test_a_blend_has_each_data_set_in_its_order_and_share() -> None:
    parts, weights = [Counted(100, 0), Counted(10_000, 1), Counted(70_000, 2)], (1, 2, 5)
    blend = TokenBlend(list(zip(parts, weights, strict=True)))
    assert len(blend) == 80_100
    found = blend.read_batch(range(len(blend)))["input_ids"][:, 0].numpy()
    assert [part.reads for part in parts] == [1, 1, 1]
    names, numbers = found % 10, found // 10
    for name, part in enumerate(parts):
        own = numbers[names == name]
        assert np.array_equal(own, np.arange(len(own)) % part.length)
        share = np.cumsum(names == name) - weights[name] / 8 * np.arange(1, len(found) + 1)
        assert np.abs(share).max() <= 2
    assert np.bincount(names[:BLOCK]).tolist() == [8192, 16384, 40960]
    assert blend[5]["input_ids"].item() == found[5]


def test_a_blend_of_two_lengths_is_refused(make: Any) -> None:
    with open_store(make().path) as store:
        blend = TokenBlend([(TokenWindows(store, 8), 1), (TokenWindows(store, 4), 1)])
        with pytest.raises(ConfigError, match=r"shape \[8\], and \[4\] of another, from data set 1; give all"):
            blend.read_batch([0, 1])


def test_a_blend_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="below 1 in"):
        TokenBlend([(Counted(5, 0), 1), (Counted(5, 1), 1e6)])
    with pytest.raises(ConfigError, match="no data sets"):
        TokenBlend([])
    with pytest.raises(ConfigError, match="no proportions"):
        TokenBlend([(Counted(5, 0), -1.0)])


def test_samples_that_are_not_there(make: Any) -> None:
    with open_store(make().path) as store:
        samples = TokenWindows(store, LENGTH)
        for wrong in (-1, len(samples)):
            with pytest.raises(IndexError, match=f"sample {wrong} "):
                samples[wrong]
        assert len(list(samples)) == len(samples)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_worker_processes_read_what_one_process_reads(make: Any, way: str) -> None:
    made = make(documents=400)
    with open_store(made.path) as store:
        samples = TokenWindows(store, LENGTH, documents=True)
        alone = list(DataLoader(samples, batch_size=8))
        workers = 4 if way == "fork" else 1
        several = list(DataLoader(samples, batch_size=8, num_workers=workers, multiprocessing_context=way))
    assert len(alone) == len(several)
    for one, other in zip(alone, several, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_store_that_was_replaced_is_not_taken_for_the_one_that_was_pickled(make: Any) -> None:
    made = make()
    with open_store(made.path) as store:
        packed = pickle.dumps(store)
        with pickle.loads(packed) as again:
            assert torch.equal(again.read(0, 100), store.read(0, 100))
            assert again.fileno() != store.fileno()
    made.path.unlink()
    make(seed=1)
    with pytest.raises(TokenStoreError, match="not the token store that was opened first"):
        pickle.loads(packed)


def test_samples_of_a_copy(make: Any) -> None:
    made, other = make(row_length=64), make("other.h5", seed=4, row_length=64)
    place = made.path.with_name("copy.h5")
    shutil.copy(made.path, place)
    with open_store(made.path) as store:
        parts = [TokenWindows(store, 8), TokenDocuments(store, 8), TokenRows(store)]
        for samples in [*parts, TokenBlend([(parts[0], 1), (TokenWindows(store, 8), 2)])]:
            assert list(map(str, samples.files())) == [str(made.path)]
            copied = samples.reopened({str(made.path): str(place)})
            assert torch.equal(copied[3]["input_ids"], samples[3]["input_ids"])
        assert parts[0].store is store
        assert parts[0].reopened({str(made.path): str(place)}).store.path == place
        with pytest.raises(TokenStoreError, match="not the token store that was opened first"):
            parts[0].reopened({str(made.path): str(other.path)})


def test_a_closed_store_says_so(make: Any) -> None:
    store = open_store(make().path)
    store.close()
    store.close()
    with pytest.raises(TokenStoreError, match="was closed"):
        store.read(0, 1)


def test_values_by_position(make: Any) -> None:
    made = make(columns={"length": "u4", "loss": "f8"})
    with open_store(made.path) as store:
        assert isinstance(store, TokenStore)
        assert store.columns == {"length": "u4", "loss": "f8"}
        assert np.array_equal(store.column("loss"), made.columns["loss"])
        assert np.array_equal(store.column("length", 3, 7), made.columns["length"][3:7])
        starts, stops = store.bounds([4, 0, 49])
        assert starts.tolist() == made.begins[[4, 0, 49]].tolist()
        assert stops.tolist() == made.begins[[5, 1, 50]].tolist()
        with pytest.raises(TokenStoreError, match="no column 'x'; it has length, loss"):
            store.column("x")
        with pytest.raises(TokenStoreError, match="table with 51"):
            store.bounds([50])


def test_an_unfinished_store_and_other_files_are_refused(tmp_path: Path) -> None:
    from mpispeed.tokens.create import create
    from mpispeed.tokens.errors import NoTokenStore, UnfinishedStore

    create(tmp_path / "half.h5", tokens=100, documents=10, dtype="u2")
    with pytest.raises(UnfinishedStore, match="goes on"):
        open_store(tmp_path / "half.h5")
    (tmp_path / "text").write_text("no HDF5")
    for name, said in (("text", "no HDF5 file"), ("none", "No such file"), (".", "no ordinary file")):
        with pytest.raises(NoTokenStore, match=said):
            open_store(tmp_path / name)
