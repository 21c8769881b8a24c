"""Metrics of all samples of a data set in memory: each rank measures a part, all sort, the first rank writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.index_layout import Array, fit_dtype
from mpispeed.curriculum.index_output import write_sum
from mpispeed.curriculum.metrics import (
    SINGLE,
    added,
    batches,
    check_metrics,
    check_sizes,
    measured,
    one_per_row,
    sample_ids,
    split,
)
from mpispeed.curriculum.ordered_writes import write_index_files
from mpispeed.curriculum.sample_sort import Pairs

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

Part = dict[str, list[Any]]
"""What a thread has found, by metric: pairs of arrays (values, numbers of samples), or one sum."""


class DistributedDataAnalyzer:
    """DeepSpeed's analyzer in memory, with its arguments and the files of its release 0.19.6, for any number of ranks.

    A rank holds 16 bytes for each of its samples and metric, and about three times that while it sorts, however often
    a value is met; what it sends to the first rank, which writes, goes in pieces. Numbers of samples of a value are in
    ascending order, whatever `sample_indices` says. The metric functions run in threads: nothing is forked.

    Files are those of `DataAnalyzer` but for the order of numbers where `sample_indices` or `index` are not ascending,
    and for the marks of documents, as DeepSpeed's two analyzers differ.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        comm: Comm,
        num_threads: int = 1,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """Check the arguments.

        Args:
            dataset: with numbers and a length; read by threads at the same time if there are several.
            comm: the ranks that share the work; all are given equal arguments.
            num_threads: parts of a rank's part.
            batch_size: samples of a call of the metric functions.
            metric_names: names of folders.
            metric_functions: batch -> tensor or array of integers.
            metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
            save_path: the folder of all, written by the first rank.
            collate_fn: list of samples -> batch; torch's by default.
            sample_indices: numbers of the samples, if they are not their positions.

        Raises:
            ConfigError: arguments that do not fit.
        """
        check_metrics(metric_names, metric_functions, metric_types)
        check_sizes(dataset, num_threads=num_threads, batch_size=batch_size)
        self.dataset, self.comm, self.num_threads, self.batch_size = dataset, comm, num_threads, batch_size
        self.metric_names, self.metric_functions = metric_names, metric_functions
        self.metric_types, self.save_path = metric_types, save_path
        self.collate_fn, self.sample_indices = collate_fn, sample_indices

    def run_map_reduce(self) -> None:
        """Measure, sort and write.

        Collective over: `comm`; if a metric function, a sample or the disk fails on a rank, all raise.

        Raises:
            ConfigError: ranks were given different arguments.
            UsageError: a metric function returned what does not fit, or the files cannot be written.
        """
        kinds = dict(zip(self.metric_names, self.metric_types, strict=True))
        asked = (len(self.dataset), kinds)
        others = self.comm.gather_objects(asked)
        if differing := [rank for rank, other in enumerate(others) if other != others[0]]:
            msg = f"rank {differing[0]} analyses {others[differing[0]]}, rank 0 {others[0]}: all need the same"
            raise ConfigError(msg)
        if not asked[0]:
            msg = "a data set without samples cannot be analysed"
            raise ConfigError(msg)
        with self.comm.together(UsageError, doing="analysing data"):
            found = self._map()
        for name, kind in kinds.items():
            if kind == SINGLE:
                write_index_files(self.comm, Path(self.save_path, name), name, _joined(found.pop(name)), asked[0])
            else:
                self._write_sum(name, found.pop(name))

    def _map(self) -> Part:
        start, stop = split(0, len(self.dataset), self.comm.size)[self.comm.rank]
        spans = split(start, stop, self.num_threads)
        failed = threading.Event()
        if len(spans) == 1:
            return self._map_span(*spans[0], failed)
        with ThreadPoolExecutor(len(spans), "analyze") as pool:
            parts = [done.result() for done in [pool.submit(self._map_span, *span, failed) for span in spans]]
        return {name: [item for part in parts for item in part[name]] for name in self.metric_names}

    def _map_span(self, start: int, stop: int, failed: threading.Event) -> Part:
        found: Part = {name: [] for name in self.metric_names}
        metrics = list(zip(self.metric_names, self.metric_functions, self.metric_types, strict=True))
        try:
            for first, rows, data in batches(self.dataset, start, stop, self.batch_size, self.collate_fn):
                if failed.is_set():
                    break
                for name, function, kind in metrics:
                    values = measured(function, data, name)
                    if kind != SINGLE:
                        found[name] = [added(found[name][0] if found[name] else None, values, name)]
                        continue
                    values = one_per_row(values, name, rows)
                    found[name].append((_signed(values, name), sample_ids(data, first, rows, self.sample_indices)))
        except BaseException:
            failed.set()
            raise
        return found

    def _write_sum(self, name: str, parts: list[Array]) -> None:
        comm = self.comm
        with comm.together(UsageError, doing=f"metric {name!r}"):
            total = None
            for part in parts:
                total = added(total, _signed(part, name), name)
        shapes = {shape for shape in comm.gather_objects(None if total is None else total.shape) if shape is not None}
        if len(shapes) > 1:
            msg = f"metric {name!r}: its function returned the shapes {[list(shape) for shape in sorted(shapes)]}"
            raise UsageError(msg)
        if total is None:  # a rank without samples
            total = np.zeros(shapes.pop(), np.int64)
        summed = torch.from_numpy(np.ascontiguousarray(total.reshape(-1)))
        comm.all_reduce(summed)
        with comm.together(UsageError, doing=f"metric {name!r}"):
            if comm.rank == 0:
                dtype = fit_dtype(int(summed.min()), int(summed.max()))
                write_sum(Path(self.save_path, name), name, summed.numpy(), dtype)


def _signed(values: Array, name: str) -> Array:
    """In 64 bits with a sign, as ranks exchange them.

    Raises:
        UsageError: a value does not fit.
    """
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        msg = f"metric {name!r}: the value {values.max()} is above 2^63 - 1, more than ranks exchange"
        raise UsageError(msg)
    return values.astype(np.int64)


def _joined(found: list[tuple[Array, Array]]) -> Pairs:
    none = np.empty(0, np.int64)
    return Pairs(
        np.concatenate([none, *(values for values, _ in found)]), np.concatenate([none, *(i for _, i in found)])
    )
