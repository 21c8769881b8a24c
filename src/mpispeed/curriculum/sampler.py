"""Sampling by difficulty from plain settings: the stream of an engine, and DeepSpeed's sampler for own loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.curriculum.cluster_files import ClusterFiles
from mpispeed.curriculum.clusters import Metric, make_clusters
from mpispeed.curriculum.difficulty_index import DifficultyIndex
from mpispeed.curriculum.index_file import IndexFileError, MMapIndexedDataset
from mpispeed.curriculum.order import CurriculumOrder, Split
from mpispeed.curriculum.schedule import CurriculumScheduler
from mpispeed.curriculum.stream import SampleStream

SECTION = "data_efficiency.data_sampling.curriculum_learning"


def make_schedules(section: Mapping[str, Any], *, warns: bool = True) -> dict[str, CurriculumScheduler]:
    """The schedules of the metrics of a section, by name; arguments as of `make_stream`.

    Raises:
        ConfigError: a key is missing or wrong; the message names the metric.
    """
    found = {}
    for name, wanted in (section.get("curriculum_metrics") or {}).items():
        try:
            # Lengths that are slow are not meant here: difficulties are values of any metric, or percentiles.
            is_custom = wanted.get("schedule_type") == "custom"
            found[name] = CurriculumScheduler(wanted, warns=warns and is_custom)
        except ConfigError as failure:
            error = type(failure)(f"{SECTION}.curriculum_metrics.{name}: {failure}")
            raise error from failure
    return found


def make_stream(
    section: Mapping[str, Any],
    samples: int,
    seed: int,
    *,
    schedules: Mapping[str, CurriculumScheduler] | None = None,
    warns: bool = True,
) -> SampleStream:
    """The stream of samples that a section `curriculum_learning` of `data_sampling` describes.

    Args:
        section: curriculum_metrics and data_cluster_path, as in the config.
        samples: of the data set.
        seed: of the order.
        schedules: those of `make_schedules`, which streams may share; made if they are left out.
        warns: as `CurriculumScheduler`.

    Raises:
        ConfigError: a key is missing or wrong, or a file cannot be used; the message names both.
    """
    schedules = make_schedules(section, warns=warns) if schedules is None else schedules
    metrics = [
        _make_metric(name, section["curriculum_metrics"][name], samples, schedule)
        for name, schedule in schedules.items()
    ]
    files = None
    if sum(metric.index is not None for metric in metrics) > 1:
        if not section.get("data_cluster_path"):
            msg = f"{SECTION}.data_cluster_path: needed for clusters of several metrics; give a folder of all nodes"
            raise ConfigError(msg)
        try:
            files = ClusterFiles(section["data_cluster_path"])
        except IndexFileError as failure:
            msg = f"{SECTION}.data_cluster_path: {failure}"
            raise ConfigError(msg) from failure
    return SampleStream(metrics, make_clusters(metrics, samples, files), seed)


def _make_metric(name: str, wanted: Mapping[str, Any], samples: int, schedule: CurriculumScheduler) -> Metric:
    where = f"{SECTION}.curriculum_metrics.{name}"
    if wanted.get("clustering_type") == "single_cluster":
        return Metric(name, schedule, None)
    kind = wanted.get("difficulty_type")
    if kind not in ("value", "percentile"):
        msg = f"{where}.difficulty_type is {kind!r}; use value or percentile"
        raise ConfigError(msg)
    order = _opened(where, "index_to_sample_path", wanted)
    values = _opened(where, "index_to_metric_path", wanted) if kind == "value" else None
    try:
        return Metric(name, schedule, DifficultyIndex(order, values, samples), is_percentile=kind == "percentile")
    except IndexFileError as failure:
        msg = f"{where}: {failure}"
        raise ConfigError(msg) from failure


def _opened(where: str, key: str, wanted: Mapping[str, Any]) -> MMapIndexedDataset:
    if not wanted.get(key):
        msg = f"{where}.{key}: needed to choose samples; give the path of the analyzer's file, without .bin or .idx"
        raise ConfigError(msg)
    try:
        return MMapIndexedDataset(wanted[key])
    except IndexFileError as failure:
        msg = f"{where}.{key}: {failure}"
        raise ConfigError(msg) from failure


class DeepSpeedDataSampler:
    """Yields this rank's micro-batches as lists of data set indices, for a script's own loader: `batch_sampler=`.

    Difficulties advance with each global batch, micro-batch x ranks x accumulation, when its first micro-batch is
    asked for. Samples do not depend on that split, and ranks do not talk to each other. A micro-batch counts as
    consumed when it is handed out; iterating again goes on there.

    Name and arguments are DeepSpeed's. Source: DeepSpeed's documentation of its data efficiency library.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any = None,
        gradient_accumulation_steps: int = 1,
        global_rank: int = 0,
        drop_last: bool = True,
    ) -> None:
        """Begin at the start.

        Args:
            data_efficiency_config: the section `data_efficiency` of the config.
            one_epoch_total_samples: samples of the data set.
            micro_batch_size: samples of a micro-batch of one rank.
            data_parallel_rank: index on the data axis.
            data_parallel_size: ranks of the data axis.
            data_parallel_group: not needed; ranks do not communicate.
            gradient_accumulation_steps: micro-batches of a global batch, of one rank.
            global_rank: rank 0 warns.
            drop_last: leave out a last global batch that would pass num_epochs of the data set.

        Raises:
            ConfigError: sizes do not fit, a key is missing or wrong, or a file cannot be used.
        """
        del data_parallel_group
        sizes = one_epoch_total_samples, micro_batch_size, data_parallel_size, gradient_accumulation_steps
        if min(sizes) < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            msg = (
                f"DeepSpeedDataSampler: {one_epoch_total_samples} samples, micro-batches of {micro_batch_size}, "
                f"{gradient_accumulation_steps} accumulation steps, and rank {data_parallel_rank} of "
                f"{data_parallel_size} describe no batches; they start at 1, and ranks at 0"
            )
            raise ConfigError(msg)
        sampling = data_efficiency_config.get("data_sampling") or {}
        section = sampling.get("curriculum_learning") or {}
        wanted = section if section.get("enabled") else {}
        stream = make_stream(
            wanted, one_epoch_total_samples, int(data_efficiency_config.get("seed", 1234)), warns=global_rank == 0
        )
        block = micro_batch_size * data_parallel_size
        self.total_samples = int(sampling.get("num_epochs", 1000)) * one_epoch_total_samples
        self.drop_last = drop_last
        self.consumed_samples = 0
        self._split = Split(
            block * gradient_accumulation_steps, micro_batch_size, data_parallel_rank, data_parallel_size
        )
        self._order = CurriculumOrder(stream, self._split, total=self.total_samples, drop_last=drop_last)

    def __len__(self) -> int:
        """Samples of the run, of all ranks."""
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self._order.batches(0, self.consumed_samples):
            self.consumed_samples += self._split.block
            yield samples

    @property
    def curriculum_schedulers(self) -> dict[str, CurriculumScheduler]:
        """The schedules by metric."""
        return {metric.name: metric.schedule for metric in self._order.stream.metrics}

    @property
    def current_difficulties(self) -> dict[str, int]:
        """Those of the global batch that was handed out last; empty before the first."""
        return self._order.difficulties(self.consumed_samples)

    @property
    def curriculum_step(self) -> int:
        """Number of the global batch that was handed out last, from 1; 0 before it."""
        return int(self.state_dict()["curriculum_step"])

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set functions that give the difficulty of a step, from 1, for metrics of schedule_type custom.

        Raises:
            UsageError: there is no such metric, or its schedule is another.
        """
        for name, function in schedule_func_dict.items():
            if name not in self.curriculum_schedulers:
                known = ", ".join(self.curriculum_schedulers) or "none"
                msg = f"set_custom_curriculum_learning_schedule: no metric is named {name!r}; metrics: {known}"
                raise UsageError(msg)
            self.curriculum_schedulers[name].set_custom_get_difficulty(function)

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """This rank's part of a list of samples of all ranks."""
        count, split = self._split.block if batch_len is None else batch_len, self._split
        start, stop = (round(rank * count / split.size) for rank in (split.rank, split.rank + 1))
        return start, stop

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which any number of ranks goes on, also inside of a global batch."""
        return {"position": self.consumed_samples, **self._order.state_dict(self.consumed_samples)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ConfigError: it is of other metrics or files.
        """
        self._order.load_state_dict(state_dict)
        self.consumed_samples = state_dict["position"]
