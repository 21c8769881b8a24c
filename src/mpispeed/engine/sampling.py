"""`data_efficiency.data_sampling`: samples of loaders by difficulty, and the number of passes over the data.

Source: DeepSpeed's documentation of its data efficiency library, and arXiv 2212.03597.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.curriculum.index_layout import IndexFileError
from mpispeed.curriculum.order import CurriculumOrder, Split
from mpispeed.curriculum.sampler import SECTION, make_schedules, make_stream
from mpispeed.curriculum.stream import Place, SampleStream
from mpispeed.data.order import EpochOrder
from mpispeed.data.sampler import SampleOrder
from mpispeed.engine.hooks import Context, Hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpispeed.data.loader import ShardedLoader
    from mpispeed.data.order import BatchOrder
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan


class Sampling:
    """The orders in which loaders of an engine take samples.

    Attributes:
        seed: of orders.
        workers: processes of a loader that read samples.
        schedules: difficulty by step, of each metric; shared by all loaders. Empty without a curriculum.
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        """Read the section.

        Raises:
            ConfigError: a schedule does not hold together.
        """
        efficiency = plan.config.data_efficiency
        sampling = efficiency.data_sampling
        self._plan, self._mesh, self._epochs = plan, mesh, sampling.num_epochs
        self.seed, self.workers = efficiency.seed, sampling.num_workers
        section = sampling.curriculum_learning
        self._section: dict[str, Any] | None = section.model_dump() if section.enabled else None
        self.schedules = make_schedules(self._section or {}, warns=mesh.rank == 0)

    def order(
        self,
        dataset: Any,
        *,
        micro_batch: int,
        step_samples: int,
        shuffles: bool,
        slot_of: Callable[[int], int] | None = None,
    ) -> BatchOrder | None:
        """The order of a data set that is shared by the batch ranks; None for one without numbers. Local.

        Args:
            dataset: map style.
            micro_batch: samples of a micro-batch of one rank.
            step_samples: samples of a global batch.
            shuffles: shuffle each pass; a curriculum always does.
            slot_of: as in `EpochOrder`.

        Raises:
            ConfigError: a file cannot be used, or is of other data.
        """
        has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        has_numbers = has_numbers and not isinstance(dataset, IterableDataset)
        if not has_numbers:
            if self._section is None:
                return None
            msg = (
                f"{SECTION} chooses samples by their numbers; {type(dataset).__name__} has none; give a data set with "
                "__getitem__ and __len__"
            )
            raise ConfigError(msg)
        rank, size, drop_last = (
            self._mesh.index("batch"),
            self._mesh["batch"].size,
            self._plan.config.dataloader_drop_last,
        )
        if self._section is None:
            samples = SampleOrder(len(dataset), self.seed, shuffles)
            return EpochOrder(
                samples, micro_batch=micro_batch, rank=rank, size=size, unit=step_samples, drop_last=drop_last,
                epochs=self._epochs, slot_of=slot_of,
            )  # fmt: skip
        stream = make_stream(self._section, len(dataset), self.seed, schedules=self.schedules)
        split = Split(step_samples, micro_batch, rank, size, slot_of)
        return CurriculumOrder(stream, split, total=self._epochs * len(dataset), drop_last=drop_last)

    def begin(self, comm: Comm, make: Callable[[], ShardedLoader | None]) -> ShardedLoader | None:
        """Make the loader of `training_data`, and what its first batch needs; refuse files that differ between ranks.

        Args:
            comm: all ranks.
            make: makes this rank's loader; None if it has no data.

        Collective over: all ranks.

        Raises:
            ConfigError: as `make`; or files of ranks differ, or a file or the first batch of this rank fails.
        """
        if self._section is None:
            return make()
        loader: ShardedLoader | None = None
        failure: Exception | None = None
        word = ""
        try:
            loader = make()
            if loader is not None:
                word = _stream_of(loader).clusters.digest()
        except IndexFileError as error:
            failure = ConfigError(f"{SECTION}: {error}")
        except Exception as error:  # also of the data set: the other ranks are on their way to the words
            failure = error
        words = comm.gather_objects(word)  # before anything is raised, as ranks fail alone
        if failure is not None:
            raise failure
        _require_same(words)
        if loader is not None and not any(each.is_custom for each in self.schedules.values()):
            try:
                _stream_of(loader).after(Place(), self._plan.batch.train_batch_size)
            except IndexFileError as error:
                msg = f"{SECTION}: {error}"
                raise ConfigError(msg) from error
        return loader


def _stream_of(loader: ShardedLoader) -> SampleStream:
    order = loader.order
    if not isinstance(order, CurriculumOrder):
        msg = f"a loader without samples by difficulty: {order}"
        raise TypeError(msg)
    return order.stream


def _require_same(words: Sequence[str]) -> None:
    """Refuse digests that differ; ranks without data have "".

    Raises:
        ConfigError: two do.
    """
    known = [(rank, word) for rank, word in enumerate(words) if word]
    odd = [rank for rank, word in known if word != known[0][1]]
    if odd:
        msg = (
            f"{SECTION}: index files of curriculum_metrics, or training data, are others on rank {odd[0]} than on rank "
            f"{known[0][0]}; give all ranks the same"
        )
        raise ConfigError(msg)


def attach(context: Context) -> Hooks | None:
    """Offer the orders of the section to loaders, and its schedules to scripts; None where it is off.

    Raises:
        ConfigError: a schedule does not hold together.
    """
    efficiency = context.plan.config.data_efficiency
    if not (efficiency.enabled and efficiency.data_sampling.enabled):
        return None
    sampling = Sampling(context.plan, context.mesh)
    for name, schedule in sampling.schedules.items():
        context.published["curricula"].add(name, schedule)
    return Hooks(published={"data_sampling": sampling})


def write_difficulties(context: Context, loader: ShardedLoader) -> None:
    """Let monitors have the difficulties of each step that `loader` gave the samples of."""

    def write(event: Mapping[str, Any]) -> None:
        # By the state, not by the order, of which a thread may ask for batches at this moment.
        for name, difficulty in loader.state_dict()["current_difficulties"].items():
            point = f"Train/Samples/curriculum_{name}", difficulty, event["samples"]
            context.published["monitor"].write_events([point])

    if context.mesh.rank == 0 and isinstance(loader.order, CurriculumOrder):
        context.bus.subscribe(Event.STEP_END, write)
