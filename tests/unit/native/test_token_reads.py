"""Rows read by position and widened: the compiled loop equals its reference, and says what is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpispeed.native.token_reads import FileTable, Labels, PastEnd, read_rows, read_rows_reference

OFFSET, COUNT = 24, 5000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[FileTable, np.ndarray]]]:
    """A table of each size of elements, with its values."""
    dice, found = np.random.default_rng(5), {}
    for itemsize in (1, 2, 4, 8):
        values = np.frombuffer(dice.bytes(COUNT * itemsize), f"<u{itemsize}")
        path = tmp_path_factory.mktemp("tables") / f"{itemsize}.bin"
        path.write_bytes(bytes(OFFSET) + values.tobytes())
        found[itemsize] = FileTable(os.open(path, os.O_RDONLY), OFFSET, COUNT, itemsize), values
    yield found
    for table, _ in found.values():
        os.close(table.handle)


RUNS = st.lists(
    st.integers(0, COUNT).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, min(90, COUNT - start)))),
    max_size=6,
)


@given(
    runs=RUNS,
    length=st.integers(0, 70),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    shift=st.none() | st.integers(0, 3),
)
def test_both_give_the_same_bits_and_they_are_those_of_the_file(
    files: dict[int, tuple[FileTable, np.ndarray]],
    runs: list[tuple[int, int]],
    length: int,
    itemsize: int,
    dtype: torch.dtype,
    shift: int | None,
) -> None:
    table, values = files[itemsize]
    starts, counts = (np.array([run[side] for run in runs], np.int64) for side in (0, 1))
    found = []
    for read in (read_rows, read_rows_reference):
        out, second = (torch.full((len(runs), length), 99, dtype=dtype) for _ in range(2))
        read(table, starts, counts, out, fill=-7, labels=None if shift is None else Labels(second, shift, -100))
        found.append((out, second))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    for row, (start, count) in enumerate(runs):
        here = values[start : start + count].astype(np.int64 if dtype == torch.int64 else np.int32)
        kept = here[:length]
        assert np.array_equal(found[0][0][row].numpy(), np.pad(kept, (0, length - len(kept)), constant_values=-7))
        if shift is not None:
            kept = here[shift : shift + length]
            wanted = np.pad(kept, (0, length - len(kept)), constant_values=-100)
            assert np.array_equal(found[0][1][row].numpy(), wanted)


@pytest.mark.parametrize("read", [read_rows, read_rows_reference])
@pytest.mark.parametrize(
    ("start", "count"), [(-1, 2), (COUNT, 1), (COUNT - 1, 2), (0, -1), (1 << 62, 1 << 62), (5, (1 << 63) - 1)]
)
def test_a_run_that_is_not_in_the_table_is_refused(
    files: dict[int, tuple[FileTable, np.ndarray]], read: object, start: int, count: int
) -> None:
    out = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(PastEnd, match=f"table with {COUNT}") as caught:
        read(files[2][0], np.array([0, start]), np.array([4, count]), out)  # type: ignore[operator]
    assert caught.value.row == 1


@pytest.mark.parametrize("read", [read_rows, read_rows_reference])
def test_a_file_that_ends_early_is_refused(files: dict[int, tuple[FileTable, np.ndarray]], read: object) -> None:
    whole = files[2][0]
    table = FileTable(whole.handle, whole.offset, whole.count + 3, 2)
    with pytest.raises(PastEnd, match="ends within elements 4998 to 5002"):
        read(table, np.array([4998]), np.array([4]), torch.zeros(1, 4, dtype=torch.int64))  # type: ignore[operator]


def test_a_closed_file_is_an_error_of_the_system(files: dict[int, tuple[FileTable, np.ndarray]]) -> None:
    handle = os.dup(files[2][0].handle)
    os.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_rows(FileTable(handle, 0, 10, 2), np.array([0]), np.array([4]), torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (torch.zeros(2, 4), "float32"),
        (torch.zeros(8, dtype=torch.int64), "pass int64 or int32"),
        (torch.zeros(4, 2, dtype=torch.int64).t(), "contiguous"),
        (torch.zeros(3, 4, dtype=torch.int64), "do not fit 3 rows"),
    ],
)
def test_wrong_matrices_are_refused(
    files: dict[int, tuple[FileTable, np.ndarray]], out: torch.Tensor, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_rows(files[2][0], np.array([0, 0]), np.array([4, 4]), out)


def test_long_rows_come_from_a_file_that_is_not_in_memory(tmp_path: Path) -> None:
    path, values = tmp_path / "long.bin", np.arange(3 << 20, dtype=np.uint32)
    path.write_bytes(values.tobytes())
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        out = torch.zeros(3, 1 << 20, dtype=torch.int64)
        starts = np.array([7, 1 << 20, (2 << 20) - 3])
        read_rows(FileTable(handle, 0, len(values), 4), starts, np.full(3, 1 << 20), out)
    finally:
        os.close(handle)
    for row, start in enumerate(starts.tolist()):
        assert torch.equal(out[row], torch.arange(start, start + (1 << 20)))
