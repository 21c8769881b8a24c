"""Metrics of all samples of a data set, in two steps over files: workers and their threads map, one process reduces."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.index_file import MMapIndexedDatasetBuilder
from mpispeed.curriculum.index_layout import data_path, fit_dtype, index_path, plain_dtype
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
from mpispeed.curriculum.reduce import MapFiles, read_sum, reduce_values

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

Results = list[dict[str, Any]]

MOST_PENDING = 100
"""Numbers of samples of one value beyond which a line is appended to the file of this value."""


class DataAnalyzer:
    """DeepSpeed's analyzer over files, with its arguments and the files of its release 0.19.6.

    `run_map` of worker w leaves in `save_path`/METRIC/workerW_threadT/ the values of this thread's samples, and a text
    file for each different value with the numbers of its samples; `run_reduce` joins them. For large data sets take
    `DistributedDataAnalyzer`, which needs no files in between.

    Files differ from DeepSpeed's where those are wrong: numbers of samples of batches that are no tensors (it takes
    the number of keys for that of samples), numbers that the smallest type for the length of the data set does not
    hold (they wrap around there), and sums that do not fit their type (an error here). Its files `*_threadT.bin`
    and `.idx` beside the results, which nobody reads, are not made.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[object] = (),
        save_path: str | Path = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Results] | None = None,
        custom_map_update: Callable[..., object] | None = None,
        custom_map_finalize: Callable[..., object] | None = None,
        custom_reduce: Callable[..., object] | None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        """Check the arguments.

        Args:
            dataset: with numbers and a length; read by threads at the same time if there are several.
            num_workers: processes that call `run_map`, each for its part of the data set.
            worker_id: which of them this one is.
            num_threads: parts of a worker's part.
            num_threads_reduce: threads that read map files; also the number of documents that results are marked with.
            specific_threads: the only threads to run; all by default.
            batch_size: samples of a call of the metric functions.
            metric_names: names of folders.
            metric_functions: batch -> tensor or array of the declared type.
            metric_types: "single_value_per_sample" or "accumulate_value_over_samples".
            metric_dtypes: integer types, of torch or NumPy.
            save_path: the folder of all.
            collate_fn: list of samples -> batch; torch's by default.
            custom_map_init: in the place of `init_metric_results`.
            custom_map_update: in the place of `update_metric_results`.
            custom_map_finalize: in the place of `finalize_metric_results`.
            custom_reduce: (dataset, metric_names, metric_types, save_path, num_workers, num_threads,
                num_threads_reduce) in the place of the reduce step.
            sample_indices: numbers of the samples, if they are not their positions.

        Raises:
            ConfigError: arguments that do not fit.
        """
        self.dataset, self.num_workers, self.worker_id = dataset, num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.specific_threads, self.batch_size = specific_threads, batch_size
        self.metric_names, self.metric_functions = metric_names, metric_functions
        self.metric_types, self.metric_dtypes = metric_types, metric_dtypes
        self.save_path, self.collate_fn, self.sample_indices = save_path, collate_fn, sample_indices
        self.custom_map_init, self.custom_map_update = custom_map_init, custom_map_update
        self.custom_map_finalize, self.custom_reduce = custom_map_finalize, custom_reduce
        self._check()

    def run_map(self) -> None:
        """Run the map step of this worker: its threads, or those that are asked for.

        Raises:
            UsageError: a metric function returned what does not fit.
        """
        wanted = list(self.specific_threads or range(self.num_threads)) if self.num_threads > 1 else [0]
        if len(wanted) == 1:
            self.run_map_helper(wanted[0])
            return
        failed = threading.Event()
        with ThreadPoolExecutor(len(wanted), "analyze") as pool:
            for done in [pool.submit(self.run_map_helper, thread, failed) for thread in wanted]:
                done.result()

    def run_map_helper(self, thread_id: int, failed: threading.Event | None = None) -> None:
        """Run the map step of one thread; it stops where `failed` is set, and sets it where it fails."""
        failed = failed or threading.Event()
        try:
            start, stop = self._span(self.worker_id, thread_id)
            begin = self.custom_map_init or self.init_metric_results
            update = self.custom_map_update or self.update_metric_results
            finish = self.custom_map_finalize or self.finalize_metric_results
            results = begin(
                thread_id, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
            )
            for first, _, data in batches(self.dataset, start, stop, self.batch_size, self.collate_fn):
                if failed.is_set():
                    return
                update(data, self.metric_types, self.metric_dtypes, self.metric_functions, results, first)
            finish(self.metric_types, self.metric_dtypes, results)
        except BaseException:
            failed.set()
            raise

    def init_metric_results(
        self,
        thread_id: int,
        metric_names: Sequence[str],
        metric_types: Sequence[str],
        metric_dtypes: Sequence[object],
        save_path: str | Path,
        worker_id: int,
    ) -> Results:
        """What a thread gathers, one dictionary a metric with DeepSpeed's keys; older map files of the thread go."""
        results: Results = []
        for name, kind, dtype in zip(metric_names, metric_types, metric_dtypes, strict=True):
            plain_dtype(dtype)
            folder = MapFiles(Path(save_path), name).folder(worker_id, thread_id)
            folder.mkdir(parents=True, exist_ok=True)
            if kind == SINGLE:
                for old in folder.glob("*.csv"):
                    if old.name.startswith(f"{name}_metric_to_sample_"):
                        old.unlink()
                values = folder / f"{name}_sample_to_metric"
                index_path(values).unlink(missing_ok=True)
                results.append({
                    "sample_to_metric_fname": str(values),
                    "sample_to_metric_builder": MMapIndexedDatasetBuilder(data_path(values), dtype),
                    "metric_to_sample_fname": str(folder / f"{name}_metric_to_sample"),
                    "metric_to_sample_dict": defaultdict(list),
                })  # fmt: skip
            else:
                total = folder / f"{name}_metric_value"
                index_path(total).unlink(missing_ok=True)
                results.append({"metric_value": None, "metric_value_fname": str(total)})
        return results

    def update_metric_results(
        self,
        data: Any,
        metric_types: Sequence[str],
        metric_dtypes: Sequence[object],
        metric_functions: Sequence[Callable[[Any], Any]],
        metric_results: Results,
        batch_start_idx: int = 0,
    ) -> None:
        """Measure a batch whose first sample has the position `batch_start_idx`."""
        rows = zip(self.metric_names, metric_types, metric_dtypes, metric_functions, metric_results, strict=True)
        for name, kind, dtype, function, result in rows:
            values = measured(function, data, name, dtype)
            if kind != SINGLE:
                result["metric_value"] = added(result["metric_value"], values, name)
                continue
            values = one_per_row(values, name)
            ids = sample_ids(data, batch_start_idx, len(values), self.sample_indices)
            result["sample_to_metric_builder"].add_rows(values, np.ones(len(values), np.int64))
            pending = result["metric_to_sample_dict"]
            order = np.argsort(values, kind="stable")
            found, begins = np.unique(values[order], return_index=True)
            for value, those in zip(found.tolist(), np.split(ids[order], begins[1:]), strict=True):
                pending[value].extend(those.tolist())
                if len(pending[value]) > MOST_PENDING:
                    _append_line(result["metric_to_sample_fname"], value, pending[value])
                    pending[value] = []

    def finalize_metric_results(
        self, metric_types: Sequence[str], metric_dtypes: Sequence[object], metric_results: Results
    ) -> None:
        """Write what is left of a thread and close its files."""
        for kind, dtype, result in zip(metric_types, metric_dtypes, metric_results, strict=True):
            if kind == SINGLE:
                builder, values = result["sample_to_metric_builder"], Path(result["sample_to_metric_fname"])
                builder.end_document()
                builder.finalize(index_path(values))
                for value, ids in result["metric_to_sample_dict"].items():
                    if ids:
                        _append_line(result["metric_to_sample_fname"], value, ids)
                result["metric_to_sample_dict"].clear()
            elif result["metric_value"] is not None:
                path = Path(result["metric_value_fname"])
                name = path.name.removesuffix("_metric_value")
                write_sum(path.parent, name, np.asarray(result["metric_value"]), plain_dtype(dtype))

    def run_reduce(self) -> None:
        """Join the map files of all workers.

        Raises:
            UsageError: map files are missing, or are not those of this data set.
            IndexFileError: map files are damaged.
        """
        if self.custom_reduce is not None:
            self.custom_reduce(
                self.dataset,
                self.metric_names,
                self.metric_types,
                self.save_path,
                self.num_workers,
                self.num_threads,
                self.num_threads_reduce,
            )
            return
        spans = {(w, t): self._span(w, t) for w in range(self.num_workers) for t in range(self.num_threads)}
        for name, kind in zip(self.metric_names, self.metric_types, strict=True):
            files = MapFiles(Path(self.save_path), name)
            if kind == SINGLE:
                reduce_values(files, spans, len(self.dataset), self.num_threads_reduce)
                continue
            total = None
            for place, (start, stop) in spans.items():
                if start < stop:
                    total = added(total, read_sum(files, place), name)
            if total is None:
                msg = f"metric {name!r}: a data set without samples has no sum"
                raise UsageError(msg)
            write_sum(files.joined, name, total, fit_dtype(int(total.min()), int(total.max())))

    def run_map_reduce(self, comm_group: Comm | None = None) -> None:
        """Run the map step, wait for all workers, and reduce on worker 0.

        Collective over: `comm_group`, whose ranks are the workers. Without it only this worker maps, and worker 0
        reduces what is there.
        """
        if comm_group is None:
            self.run_map()
            if self.worker_id == 0:
                self.run_reduce()
            return
        with comm_group.together(UsageError, doing="analysing data"):
            self.run_map()
        with comm_group.together(UsageError, doing="joining metrics"):
            if self.worker_id == 0:
                self.run_reduce()

    def _check(self) -> None:
        check_metrics(self.metric_names, self.metric_functions, self.metric_types)
        names = ("num_workers", "num_threads", "num_threads_reduce", "batch_size")
        check_sizes(self.dataset, **{name: getattr(self, name) for name in names})
        if len(self.metric_dtypes) != len(self.metric_names):
            msg = f"{len(self.metric_names)} metric_names and {len(self.metric_dtypes)} metric_dtypes do not fit"
            raise ConfigError(msg)
        threads = list(self.specific_threads)
        if not 0 <= self.worker_id < self.num_workers or not set(threads) <= set(range(self.num_threads)):
            msg = (
                f"worker_id={self.worker_id!r} and specific_threads={threads!r} have to be below "
                f"num_workers={self.num_workers} and num_threads={self.num_threads}"
            )
            raise ConfigError(msg)

    def _span(self, worker: int, thread: int) -> tuple[int, int]:
        start, stop = split(0, len(self.dataset), self.num_workers)[worker]
        return split(start, stop, self.num_threads)[thread]


def _append_line(path: str, value: int, ids: list[int]) -> None:
    with Path(f"{path}_{value}.csv").open("a", newline="") as file:
        file.write(",".join(map(str, ids)) + "\r\n")
