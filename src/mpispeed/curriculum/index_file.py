"""Readers and writers of rows of integers in pairs of files `NAME.bin` and `NAME.idx`, as DeepSpeed has them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from mpispeed.curriculum.index_layout import (
    CODES,
    HEAD,
    MAGIC,
    MEGATRON_CODES,
    MOST_VALUES,
    PIECE_ROWS,
    Array,
    IndexFileError,
    OutFile,
    PlainFile,
    data_path,
    fitted,
    index_path,
    plain_dtype,
    read_head,
)

_COPY_BYTES = 8 << 20


class MMapIndexedDataset:
    """Reads rows by their numbers. Copies share the file; it is safe to read after a fork and from threads.

    What an index says is checked before it is used: its size against its counts when it is opened, lengths and offsets
    of rows when these rows are read, all of them by `check`. Nothing of the index is held but its head.

    The name is DeepSpeed's; files are not mapped into memory.

    Attributes:
        path: without the endings.
        dtype: of values.
    """

    def __init__(
        self, path: str | Path, skip_warmup: bool = True, *, codes: Mapping[int, np.dtype[Any]] = CODES
    ) -> None:
        """Open `path`.idx and `path`.bin.

        Args:
            path: without the endings.
            skip_warmup: taken for DeepSpeed's sake; files are never read through in advance.
            codes: what codes of types mean: `CODES` or `MEGATRON_CODES`.

        Raises:
            IndexFileError: a file is missing, no ordinary file, or damaged.
        """
        del skip_warmup
        self.path, self._codes = os.fspath(path), codes
        self._index, self._data = PlainFile(index_path(path)), PlainFile(data_path(path))
        self.dtype, self._rows, self._marks = read_head(self._index, codes)
        if self._rows:
            offsets, sizes = self._read_index(self._rows - 1, self._rows)
            end = int(offsets[0]) + int(sizes[0]) * self.dtype.itemsize
            if end != self._data.size:
                told = f"{self._index.path.name} says that rows end at {end}"
                msg = f"{self._data.path} has {self._data.size} bytes, but {told}"
                raise IndexFileError(msg)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._codes is MEGATRON_CODES)

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, idx: int) -> Array: ...

    @overload
    def __getitem__(self, idx: slice) -> list[Array]: ...

    def __getitem__(self, idx: int | slice) -> Array | list[Array]:
        """The values of a row, or a list of them for a slice of rows; a step other than 1 is a ValueError."""
        if not isinstance(idx, slice):
            row = self._row(idx)
            return self.read(row, row + 1)[0]
        start, stop, step = idx.indices(self._rows)
        if step != 1:
            msg = f"rows of {self.path} are read in order: a slice with step {step} is not possible"
            raise ValueError(msg)
        values, sizes = self.read(start, max(start, stop))
        return np.split(values, np.cumsum(sizes[:-1])) if len(sizes) else []

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Array:
        """A part of a row: `length` values from `offset` on, all others by default.

        Raises:
            IndexError: the row has no such values.
        """
        row = self._row(idx)
        offsets, sizes = self._read_index(row, row + 1)
        size = int(sizes[0])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            msg = f"row {row} of {self.path} has {size} values; {length} from {offset} on were asked for"
            raise IndexError(msg)
        return self._values(int(offsets[0]) + offset * self.dtype.itemsize, length)

    def read(self, start: int, stop: int) -> tuple[Array, npt.NDArray[np.int32]]:
        """Values of consecutive rows one after another, and the length of each row; by one read of `.bin`.

        Raises:
            IndexError: there are no such rows.
            IndexFileError: lengths or offsets of these rows do not hold.
        """
        self._check_range(start, stop)
        if start == stop:
            return np.empty(0, self.dtype), np.empty(0, np.int32)
        offsets, sizes = self._read_index(start, stop)
        return self._values(int(offsets[0]), int(sizes.sum(dtype=np.int64))), sizes

    @property
    def value_count(self) -> int:
        """Values of all rows together."""
        return self._data.size // self.dtype.itemsize

    def first_value(self, row: int) -> int:
        """Number of values in all rows before `row`, which may be the number of rows.

        Raises:
            IndexError: there is no such row.
            IndexFileError: the offset of the row does not hold.
        """
        if row == self._rows:
            return self.value_count
        self._check_range(row, row + 1)
        return int(self._read_index(row, row + 1)[0][0]) // self.dtype.itemsize

    def read_values(self, start: int, stop: int) -> Array:
        """Values by their numbers in the order of the file, whatever row they are in.

        Raises:
            IndexError: there are no such values.
        """
        if not 0 <= start <= stop <= self.value_count:
            msg = f"{self.path} has {self.value_count} values; those from {start} to {stop} were asked for"
            raise IndexError(msg)
        return self._values(start * self.dtype.itemsize, stop - start)

    def read_sizes(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Lengths of rows from `start` to `stop`, checked. Raises as `read`."""
        self._check_range(start, stop)
        return self._read_index(start, stop)[1] if stop > start else np.empty(0, np.int32)

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Lengths of all rows; 4 bytes each, read anew whenever it is asked for."""
        pieces = [self.read_sizes(start, stop) for start, stop in self._pieces()]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int32)

    def size(self, index: int) -> int:
        """Length of a row."""
        row = self._row(index)
        return int(self._read_index(row, row + 1)[1][0])

    @property
    def doc_idx(self) -> npt.NDArray[np.int64]:
        """Document marks: numbers of rows in ascending order.

        Raises:
            IndexFileError: they are not.
        """
        raw = self._index.read(HEAD.size + 12 * self._rows, 8 * self._marks)
        marks = np.frombuffer(raw, "<i8").astype(np.int64)
        if len(marks) and (marks[0] < 0 or marks[-1] > self._rows or (marks[1:] < marks[:-1]).any()):
            msg = f"{self._index.path}: document marks are not numbers of its {self._rows} rows in ascending order"
            raise IndexFileError(msg)
        return marks

    def get_doc_idx(self) -> npt.NDArray[np.int64]:
        """As `doc_idx`."""
        return self.doc_idx

    def check(self) -> None:
        """Check lengths and offsets of all rows, and document marks; values are not read.

        Raises:
            IndexFileError: with the first thing that does not hold.
        """
        end = 0
        for start, stop in self._pieces():
            offsets, sizes = self._read_index(start, stop)
            if int(offsets[0]) != end:
                raise IndexFileError(_gap(self._index.path, start, end, int(offsets[0])))
            end = int(offsets[-1]) + int(sizes[-1]) * self.dtype.itemsize
        if end != self._data.size:
            msg = f"{self._data.path} has {self._data.size} bytes, but its rows have {end}"
            raise IndexFileError(msg)
        _ = self.doc_idx

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether both files are there."""
        return index_path(path).is_file() and data_path(path).is_file()

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self._rows, PIECE_ROWS):
            yield start, min(start + PIECE_ROWS, self._rows)

    def _row(self, idx: int) -> int:
        row = int(idx) + (self._rows if idx < 0 else 0)
        self._check_range(row, row + 1)
        return row

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._rows:
            what = f"row {start}" if stop == start + 1 else f"rows {start} to {stop}"
            msg = f"{self.path} has {self._rows} rows; {what} were asked for"
            raise IndexError(msg)

    def _read_index(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Offsets and lengths of at least one row, checked: they follow one another and end inside of `.bin`."""
        count = stop - start
        sizes = np.frombuffer(self._index.read(HEAD.size + 4 * start, 4 * count), "<i4").astype(np.int32)
        place = HEAD.size + 4 * self._rows + 8 * start
        offsets = np.frombuffer(self._index.read(place, 8 * count), "<i8").astype(np.int64)
        if (sizes < 0).any():
            row = int(np.argmax(sizes < 0))
            msg = f"{self._index.path}: row {start + row} has the length {sizes[row]}"
            raise IndexFileError(msg)
        first = int(offsets[0])
        if not 0 <= first <= self._data.size:
            msg = f"{self._index.path}: row {start} begins at byte {first} of {self._data.size} bytes"
            raise IndexFileError(msg)
        ends = first + np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize
        wrong = offsets[1:] != ends[:-1]
        if wrong.any():
            row = int(np.argmax(wrong))
            raise IndexFileError(_gap(self._index.path, start + row + 1, int(ends[row]), int(offsets[row + 1])))
        too_far = ends > self._data.size  # any of them: sums that overflow pass through large values first
        if too_far.any():
            row = int(np.argmax(too_far))
            msg = f"{self._index.path}: row {start + row} ends at byte {ends[row]} of {self._data.size} bytes"
            raise IndexFileError(msg)
        return offsets, sizes

    def _values(self, place: int, count: int) -> Array:
        out = np.empty(count, self.dtype)
        self._data.read_into(out.view(np.uint8).data, place)
        return out


class MMapIndexedDatasetBuilder:
    """Writes a pair of files row by row: values into `out_file` at once, the index at last.

    Values that the type does not hold are refused. The index holds 4 bytes a row meanwhile.
    """

    def __init__(self, out_file: str | Path, dtype: object = np.int64) -> None:
        """Create `out_file`, the path of `.bin`; an older file goes.

        Args:
            out_file: with its ending.
            dtype: of values: NumPy's or torch's.

        Raises:
            IndexFileError: there is no code for the type.
        """
        self.dtype = plain_dtype(dtype)
        self._path = Path(out_file)
        self._data_file = OutFile(self._path)
        self._sizes, self._doc_idx = array("i"), array("q", [0])

    def add_item(self, tensor: Any) -> None:
        """Add a row: a tensor or an array of any shape."""
        self.add_item_numpy(tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor))

    def add_item_numpy(self, np_array: Array) -> None:
        """Add a row."""
        self.add_rows(np_array, [np_array.size])

    def add_items(self, arr_list: Iterable[Array]) -> None:
        """Add rows."""
        for values in arr_list:
            self.add_item(values)

    def add_rows(self, values: Array, sizes: npt.ArrayLike) -> None:
        """Add rows whose values stand one after another.

        Args:
            values: of all rows.
            sizes: the length of each row; they sum up to the number of values.

        Raises:
            IndexFileError: lengths do not fit, or a value does not fit the type.
        """
        lengths = np.asarray(sizes, np.int64)
        if lengths.size and (lengths.min() < 0 or lengths.max() > MOST_VALUES):
            msg = f"{self._path}: a row of {lengths.max()} values cannot be stored; the most are {MOST_VALUES}"
            raise IndexFileError(msg)
        if int(lengths.sum()) != values.size:
            msg = f"{self._path}: rows of {int(lengths.sum())} values were announced, {values.size} were given"
            raise IndexFileError(msg)
        self._data_file.write(fitted(values, self.dtype, self._path))
        self._sizes.frombytes(lengths.astype(np.int32).tobytes())

    def end_document(self) -> None:
        """Mark the end of a document after the rows so far."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Add all rows and document marks of another pair of files of the same type; `another_file` is without ending.

        Raises:
            IndexFileError: it is of another type, or damaged.
        """
        other = MMapIndexedDataset(another_file)
        if other.dtype != self.dtype:
            msg = f"{other.path} has values of {other.dtype}; they cannot be merged into {self._path} of {self.dtype}"
            raise IndexFileError(msg)
        other.check()
        marks = len(self._sizes) + other.doc_idx[1:]
        self._sizes.frombytes(other.sizes.tobytes())
        self._doc_idx.frombytes(marks.tobytes())
        data = PlainFile(data_path(another_file))
        for place in range(0, data.size, _COPY_BYTES):
            self._data_file.write(np.frombuffer(data.read(place, min(_COPY_BYTES, data.size - place)), np.uint8))

    def finalize(self, index_file: str | Path) -> None:
        """Close `.bin` and write the index, which appears complete; `index_file` is its path with the ending."""
        self._data_file.close()
        sizes, marks = np.frombuffer(self._sizes, np.int32), np.frombuffer(self._doc_idx, np.int64)
        write_index(Path(index_file), self.dtype, sizes, marks)


def write_index(
    path: Path, dtype: np.dtype[Any], sizes: npt.NDArray[np.int32], marks: Iterable[int] | npt.NDArray[np.int64]
) -> None:
    """Write `.idx` for rows of these lengths; it appears complete, in the place of an older one."""
    part = path.with_name(f".{path.name}.part")
    code = next(code for code, known in CODES.items() if known == dtype)
    marks = np.asarray(marks, "<i8")
    file = OutFile(part)
    file.write(np.frombuffer(HEAD.pack(MAGIC, 1, code, len(sizes), len(marks)), np.uint8))
    for start in range(0, len(sizes), PIECE_ROWS):
        file.write(sizes[start : start + PIECE_ROWS].astype("<i4"))
    end = 0
    for start in range(0, len(sizes), PIECE_ROWS):
        lengths = sizes[start : start + PIECE_ROWS].astype(np.int64) * dtype.itemsize
        ends = end + np.cumsum(lengths)
        file.write((ends - lengths).astype("<i8"))
        end = int(ends[-1])
    file.write(marks)
    file.close()
    part.replace(path)


def opened(path: str | Path) -> MMapIndexedDataset:
    """A pair of files by the path of either, or without ending. Types are Megatron's where DeepSpeed's do not fit.

    Raises:
        IndexFileError: it is damaged, or no such pair.
    """
    name = os.fspath(path)
    name = name[:-4] if name.endswith((".idx", ".bin")) else name
    try:
        return MMapIndexedDataset(name)
    except IndexFileError as failure:
        try:
            return MMapIndexedDataset(name, codes=MEGATRON_CODES)
        except IndexFileError:
            raise failure from None


def summary(path: str | Path) -> dict[str, Any]:
    """What a pair of files says of itself, for people. Raises as `opened`."""
    data = opened(path)
    data.check()
    values, shortest, longest = 0, MOST_VALUES, 0
    for start, stop in data._pieces():
        sizes = data.read_sizes(start, stop)
        values += int(sizes.sum(dtype=np.int64))
        shortest, longest = min(shortest, int(sizes.min())), max(longest, int(sizes.max()))
    return {
        "format": "rows of numbers, as of DeepSpeed's analyzer and of Megatron (MMIDIDX)",
        "dtype": data.dtype.name,
        "rows": len(data),
        "values": values,
        "shortest row": min(shortest, longest),
        "longest row": longest,
        "document marks": len(data.doc_idx),
    }


def _reopen(path: str, is_megatron: bool) -> MMapIndexedDataset:
    return MMapIndexedDataset(path, codes=MEGATRON_CODES if is_megatron else CODES)


def _gap(path: Path, row: int, end: int, begin: int) -> str:
    return f"{path}: row {row} begins at byte {begin}, the row before ends at byte {end}"
