"""Documents of Parquet and Arrow files: a column of texts, or of lists of token ids."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mpispeed.base.plain import printable
from mpispeed.tokens_build.errors import BuildError, Faults
from mpispeed.tokens_build.inputs import (
    BATCH_BYTES,
    MOST_DOCUMENT_BYTES,
    PARQUET,
    Batch,
    Input,
    Reading,
    Slice,
    TokenRun,
    open_input,
)

_ROWS = 1024
"""Rows that are read at a time; texts of a batch are cut again by their size."""


def cut(number: int, one: Input, reading: Reading, part_bytes: int) -> Iterator[Slice]:
    """Slices of whole row groups (Parquet) or record batches (Arrow); Arrow's streams are one slice.

    Raises:
        BuildError: the file cannot be read, or has no column of that name.
    """
    with _opened(one) as file:
        if one.kind != PARQUET:
            reader, count = _arrow_reader(one, file)
            _check_column(one, reader.schema, reading.field)
            weight = -(-one.size // max(1, count))
            yield from (Slice(number, at, at + 1, weight) for at in range(count))
            return
        reader = _parquet_reader(one, file)
        _check_column(one, reader.schema_arrow, reading.field)
        for at in range(reader.metadata.num_row_groups):
            yield Slice(number, at, at + 1, max(1, _weight(reader.metadata.row_group(at), reading.field)))


def _weight(group: Any, field: str) -> int:
    columns = (group.column(at) for at in range(group.num_columns))
    sizes = [column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] == field]
    return int(sum(sizes))


def read(one: Input, begin: int, stop: int, reading: Reading, faults: Faults) -> Iterator[Batch]:
    """The documents of row groups or record batches `begin` to `stop`; rows without a value are bad records.

    Raises:
        BuildError: the file cannot be read or has changed, or has a bad record and `faults` ends at the first.
    """
    arrow = _arrow(one)
    with _opened(one) as file:
        groups = _parquet_groups if one.kind == PARQUET else _arrow_groups
        try:
            for group, batches in groups(one, file, begin, stop, reading.field):
                row = 0
                for batch in batches:
                    yield from _documents(one, batch.column(0), (group, row), faults)
                    row += len(batch)
        except (OSError, ValueError, MemoryError, arrow.ArrowException) as failure:  # of damaged files any of them
            msg = f"{printable(one.path)} cannot be read: {str(failure) or type(failure).__name__}"
            raise BuildError(msg) from failure


def _opened(one: Input) -> Any:
    _arrow(one)
    return open_input(one)


def _arrow(one: Input) -> Any:
    try:
        import pyarrow as arrow  # an extra
    except ImportError as failure:
        msg = f"{printable(one.path)} is read with pyarrow, which is not installed; pip install 'mpispeed[data]'"
        raise BuildError(msg) from failure
    return arrow


def _parquet_reader(one: Input, file: Any) -> Any:
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file)
    except (OSError, ValueError, MemoryError, pyarrow.ArrowException) as failure:
        msg = f"{printable(one.path)} is no Parquet file that can be read: {failure}"
        raise BuildError(msg) from failure


def _arrow_reader(one: Input, file: Any, columns: list[int] | None = None) -> tuple[Any, int]:
    """A reader of Arrow's files or streams, and its number of slices; `columns`: only these, by number."""
    import pyarrow
    from pyarrow import ipc

    options = ipc.IpcReadOptions(included_fields=columns, use_threads=False)
    try:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = ipc.open_file(file, options=options)
            return reader, reader.num_record_batches
        return ipc.open_stream(file, options=options), 1
    except (OSError, ValueError, MemoryError, pyarrow.ArrowException) as failure:
        msg = f"{printable(one.path)} is no Arrow file that can be read: {failure}"
        raise BuildError(msg) from failure


def _check_column(one: Input, schema: Any, field: str) -> None:
    if schema.names.count(field) != 1:
        names = ", ".join(repr(printable(name, 40)) for name in schema.names[:8]) or "nothing"
        msg = f"{printable(one.path)} has no column {printable(field, 60)!r} (it has {names}); name it with --field"
        raise BuildError(msg)
    import pyarrow.types as types

    kind = schema.field(field).type
    while types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind) or (_is_list(kind) and types.is_integer(kind.value_type)):
        return
    msg = f"the column {printable(field, 60)!r} of {printable(one.path)} has {printable(str(kind), 60)}; expected "
    msg += "texts, or lists of token ids"
    raise BuildError(msg)


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    is_view = getattr(types, "is_string_view", lambda _: False)
    return bool(types.is_string(kind) or types.is_large_string(kind) or is_view(kind))


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _parquet_groups(one: Input, file: Any, begin: int, stop: int, field: str) -> Iterator[tuple[int, Any]]:
    """Numbers of row groups, and the batches of one column in each."""
    reader = _parquet_reader(one, file)
    for group in range(begin, stop):
        yield group, reader.iter_batches(_ROWS, row_groups=[group], columns=[field], use_threads=False)


def _arrow_groups(one: Input, file: Any, begin: int, stop: int, field: str) -> Iterator[tuple[int, Any]]:
    """Numbers of record batches, and one column of each in pieces."""
    names = _arrow_reader(one, file)[0].schema.names
    file.seek(0)
    reader, _ = _arrow_reader(one, file, [names.index(field)])  # other columns are not read
    is_file = hasattr(reader, "get_batch")
    wholes = ((group, reader.get_batch(group)) for group in range(begin, stop)) if is_file else enumerate(reader)
    for group, whole in wholes:
        column = whole.select([0]) if len(whole.schema) == 1 else whole.select([field])
        column.validate(full=True)  # offsets of a damaged file would be followed anywhere
        yield group, (column.slice(at, _ROWS) for at in range(0, len(column), _ROWS))


def _documents(one: Input, column: Any, place: tuple[int, int], faults: Faults) -> Iterator[Batch]:
    import pyarrow.types as types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(~valid).tolist():
            faults.bad(partial(_row, one, place, row), "it has no value")
        column = column.filter(column.is_valid())
    is_text = _is_text(column.type)
    column = _without_long(one, column, place, is_text, faults)
    if is_text:
        yield from _cut_texts(column.to_pylist())
    else:
        yield _run(one, column, place)


def _without_long(one: Input, column: Any, place: tuple[int, int], is_text: bool, faults: Faults) -> Any:
    """The documents that are not too long."""
    from pyarrow import compute

    sizes = compute.binary_length(column) if is_text else compute.list_value_length(column)
    most = MOST_DOCUMENT_BYTES if is_text else MOST_DOCUMENT_BYTES // (column.type.value_type.bit_width // 8)
    if (compute.max(sizes).as_py() or 0) <= most:
        return column
    is_long = compute.greater(sizes, most)
    for _ in range(compute.sum(is_long).as_py()):
        faults.bad(partial(_row, one, place, 0), "it or a row after it is too long for one document")
    return column.filter(compute.invert(is_long))


def _row(one: Input, place: tuple[int, int], row: int) -> str:
    kind = "row group" if one.kind == PARQUET else "record batch"
    return f"{printable(one.path)}, row {place[1] + row} of {kind} {place[0]}"


def _cut_texts(texts: list[str]) -> Iterator[Batch]:
    first = size = 0
    for at, text in enumerate(texts):
        size += len(text)
        if size >= BATCH_BYTES:
            yield texts[first : at + 1]
            first, size = at + 1, 0
    if first < len(texts):
        yield texts[first:]


def _run(one: Input, column: Any, place: tuple[int, int]) -> Batch:
    from pyarrow import compute

    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = compute.list_flatten(column)
    if tokens.null_count:
        msg = f"{_row(one, place, 0)} or after it: a list of token ids has an empty place"
        raise BuildError(msg)
    return TokenRun(tokens.to_numpy(zero_copy_only=False), lengths)
