"""Metrics of samples: what a user's functions return for batches, and the numbers of the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.index_layout import Array, plain_dtype

SINGLE = "single_value_per_sample"
"""Type of a metric: one value for each row of a batch."""
SUM = "accumulate_value_over_samples"
"""Type of a metric: one value or vector for a batch; all batches are summed."""

Ids = npt.NDArray[np.int64]


def check_metrics(names: Sequence[str], functions: Sequence[object], types: Sequence[str]) -> None:
    """Check that there are as many functions and types as names, and that names can be names of folders.

    Raises:
        ConfigError: they do not fit.
    """
    if not len(names) == len(functions) == len(types):
        msg = f"{len(names)} metric_names, {len(functions)} metric_functions and {len(types)} metric_types do not fit"
        raise ConfigError(msg)
    for name, kind in zip(names, types, strict=True):
        if not name or name.startswith(".") or any(sign in name for sign in "/\\\0"):
            msg = f"metric_names: {name!r} cannot be the name of a folder; take letters, digits, _ and -"
            raise ConfigError(msg)
        if kind not in (SINGLE, SUM):
            msg = f"metric_types: {kind!r} of {name!r} is neither {SINGLE!r} nor {SUM!r}"
            raise ConfigError(msg)
    if len(set(names)) < len(names):
        msg = f"metric_names {list(names)} are not all different; each has a folder of its own"
        raise ConfigError(msg)


def check_sizes(dataset: object, **counts: int) -> None:
    """Check that a data set has numbers and a length, and that counts are whole and positive.

    Raises:
        ConfigError: otherwise.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        msg = f"a data set of type {type(dataset).__name__} cannot be analysed: it needs __getitem__ and __len__"
        raise ConfigError(msg)
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            msg = f"{name}={count!r} is no positive whole number"
            raise ConfigError(msg)


def split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut a range into consecutive parts of nearly equal lengths; borders are those of NumPy's `linspace`."""
    borders = [int(border) for border in np.linspace(start, stop, num=parts + 1, dtype=np.int64)]
    return list(pairwise(borders))


def batches(
    dataset: Any, start: int, stop: int, size: int, collate: Callable[[list[Any]], Any] | None = None
) -> Iterator[tuple[int, int, Any]]:
    """The first number, the number of samples, and the batch of consecutive samples, each of `size` but the last.

    `read_batch(numbers)` of a data set is taken where it is there, unless `collate` is given.
    """
    read = getattr(dataset, "read_batch", None) if collate is None else None
    collate = collate or default_collate
    for first in range(start, stop, size):
        numbers = list(range(first, min(first + size, stop)))
        if read is not None:
            yield first, len(numbers), read(numbers)
            continue
        many = getattr(dataset, "__getitems__", None)
        yield first, len(numbers), collate([dataset[i] for i in numbers] if many is None else many(numbers))


def measured(function: Callable[[Any], Any], data: Any, name: str, dtype: object | None = None) -> Array:
    """What a metric function returns for a batch, as an array.

    Raises:
        UsageError: it is no tensor or array of integers, or not of the declared type.
    """
    values = function(data)
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    if not isinstance(values, np.ndarray):
        msg = f"metric {name!r}: its function returned a {type(values).__name__}; it must return a tensor or an array"
        raise UsageError(msg)
    if dtype is not None and values.dtype != plain_dtype(dtype):
        msg = f"metric {name!r}: its function returned {values.dtype}, but metric_dtypes says {dtype}"
        raise UsageError(msg)
    if values.dtype.kind not in "iu":
        msg = f"metric {name!r}: its function returned {values.dtype}; files of metrics hold integers only"
        raise UsageError(msg)
    return values


def one_per_row(values: Array, name: str, rows: int | None = None) -> Array:
    """Values [rows] of a metric with one value per sample; `rows` is their number where it is known.

    Raises:
        UsageError: there are more or fewer.
    """
    wanted = values.shape[0] if rows is None and values.ndim else rows
    if not values.ndim or values.size != values.shape[0] or values.size != wanted:
        of_rows = "" if rows is None else f" for {rows} samples"
        msg = (
            f"metric {name!r}: its function returned the shape {list(values.shape)}{of_rows}; one value each is wanted"
        )
        raise UsageError(msg)
    return values.reshape(-1)


def sample_ids(data: Any, first: int, rows: int, sample_indices: Sequence[int] | None) -> Ids:
    """Numbers of the samples of a batch: its `index` if it has one, else `sample_indices`, else running numbers.

    Raises:
        UsageError: there are fewer than rows.
    """
    if isinstance(data, Mapping) and "index" in data:
        index = data["index"]
        found = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index, np.int64)
        found = found.reshape(len(found), -1)[:, 0]
    elif sample_indices is not None:
        found = np.asarray([int(number) for number in sample_indices[first : first + rows]], np.int64)
    else:
        return np.arange(first, first + rows, dtype=np.int64)
    if len(found) != rows:
        msg = f"samples {first} to {first + rows - 1}: {rows} values of a metric, but {len(found)} numbers of samples"
        raise UsageError(msg)
    return found


def added(total: Array | None, values: Array, name: str) -> Array:
    """The running sum of a metric that is accumulated, in 64 bits; `total` is changed.

    Raises:
        UsageError: the shapes differ.
    """
    if total is None:
        return values.astype(np.uint64 if values.dtype == np.uint64 else np.int64)
    if total.shape != values.shape:
        msg = f"metric {name!r}: its function returned the shapes {list(total.shape)} and {list(values.shape)}"
        raise UsageError(msg)
    total += values
    return total
