"""A rank's micro-batches of the stream of samples by difficulty: what a loader follows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpispeed.base.errors import ConfigError
from mpispeed.curriculum.stream import Batch, Place, SampleStream

_MOST_PLACES = 4096
"""Places of batches that are kept, for loaders that go back over micro-batches whose gradients were not used."""


@dataclass(frozen=True, slots=True)
class Split:
    """The division of a global batch: into micro-steps, each into one micro-batch for each rank of the data axis.

    Attributes:
        batch: samples of a global batch, a multiple of `micro_batch * size`.
        micro_batch: samples of one rank in one micro-step.
        rank: index on the data axis.
        size: ranks of the data axis.
        slot_of: the slot of this rank in a micro-step of a global batch, which is cut into slots of `micro_batch`
            samples; None: slots go to the ranks in turn.
    """

    batch: int
    micro_batch: int
    rank: int
    size: int
    slot_of: Callable[[int], int] | None = None

    @property
    def block(self) -> int:
        """Samples of a micro-step."""
        return self.micro_batch * self.size

    def start(self, first: int, position: int) -> int:
        """Number of this rank's first sample in the micro-step at `position`; global batches begin at `first`."""
        if self.slot_of is None:
            return position + self.rank * self.micro_batch
        batch, within = divmod(position - first, self.batch)
        return first + batch * self.batch + self.slot_of(within // self.block) * self.micro_batch


class CurriculumOrder:
    """The micro-batches of one rank of the data axis, as `mpispeed.data.BatchOrder` describes orders.

    All samples of a run are one epoch: `offset` and `position` count the samples of all ranks since its start. A
    micro-step takes `block` consecutive samples of a global batch, and rank r the r-th slice of them; a place inside of
    a batch may be taken up with any split. A run ends with the last global batch that begins before `total` samples; it
    is whole, or is left out with `drop_last` if it would pass `total`.
    """

    def __init__(self, stream: SampleStream, split: Split, *, total: int, drop_last: bool) -> None:
        """Begin at the start.

        Args:
            stream: global batches.
            split: this rank's part of them.
            total: samples of the run: epochs times the samples of the data set.
            drop_last: leave out a last global batch that would pass `total`.

        Raises:
            ConfigError: the split does not divide a global batch.
        """
        if split.batch < 1 or split.batch % split.block:
            msg = (
                f"a global batch of {split.batch} samples is not divided by micro-batches of {split.micro_batch} on "
                f"{split.size} ranks"
            )
            raise ConfigError(msg)
        self.stream, self.split, self._total, self._drop_last = stream, split, total, drop_last
        self._start = Place()
        self._known = [self._start]  # ascending
        self._batch: tuple[Batch, Place] | None = None  # the last one that was made, and the place after it

    @property
    def length(self) -> int:
        """Samples of the run, with the fill-up of its last batch."""
        first = self._start.consumed
        batches, rest = divmod(max(0, self._total - first), self.split.batch)
        return first + (batches + bool(rest and not self._drop_last)) * self.split.batch

    def count(self, epoch: int, offset: int) -> int:
        """Micro-batches of each rank from a place to the end of the run."""
        return 0 if epoch else -(-max(0, self.length - offset) // self.split.block)

    def batches(self, epoch: int, offset: int) -> Iterator[list[int]]:
        """Those micro-batches of this rank.

        Raises:
            ConfigError: no sample is as easy as the first difficulties ask for.
            IndexFileError: an index or a cluster cannot be read.
            UsageError: the function of a custom schedule is missing, or gives no whole number.
        """
        split = self.split
        for step in range(self.count(epoch, offset)):
            start = split.start(self._start.consumed, offset + step * split.block)
            yield self._samples(start, start + split.micro_batch)

    def difficulties(self, position: int) -> dict[str, int]:
        """Difficulties of the global batch to which the sample before `position` belongs; empty at the start."""
        place = self._place_at(position)
        is_inside = position > place.consumed
        return dict(self._batch_at(position)[0].difficulties) if is_inside else self.stream.named(place)

    def state_dict(self, position: int) -> dict[str, Any]:
        """What defines the stream from `position` on, and what a function of batches may want to know.

        The keys are DeepSpeed's: `current_difficulties` and `curriculum_step` are those of the batch before
        `position`, `consumed_samples` is `position`.
        """
        place = self._place_at(position)
        return {
            "consumed_samples": position,
            "curriculum_step": place.step + (position > place.consumed),
            "current_difficulties": self.difficulties(position),
            "place": self.stream.values_of(place),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` cannot take the state of a loader; changes nothing.

        Raises:
            ConfigError: it is of a loader without this curriculum, or of other metrics or files.
        """
        self._place_of(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of a state; its seed wins, because it defines the stream. Raises as `check_state`."""
        place = self._place_of(state)
        if self.stream.seed != state["place"]["seed"]:
            self.stream = self.stream.with_seed(state["place"]["seed"])
        self._start, self._known, self._batch = place, [place], None

    def _place_of(self, state: Mapping[str, Any]) -> Place:
        if "place" not in state:
            msg = (
                "the saved position is of training without data_efficiency.data_sampling.curriculum_learning; switch "
                "it off, or begin the data anew with load_checkpoint(..., load_data_state=False)"
            )
            raise ConfigError(msg)
        place = self.stream.place_of(state["place"])
        if not place.consumed <= state["position"]:
            msg = f"the saved position {state['position']} is before its global batch, which begins at {place.consumed}"
            raise ConfigError(msg)
        return place

    def _samples(self, start: int, stop: int) -> list[int]:
        """Data set indices of samples by their numbers in the run, of one batch or of two."""
        found: list[int] = []
        while start < stop:
            batch, after = self._batch_at(start)
            first, until = batch.place.consumed, min(stop, after.consumed)
            found += self.stream.samples(batch, start - first, until - first)
            start = until
        return found

    def _batch_at(self, position: int) -> tuple[Batch, Place]:
        """The global batch of a sample, and the place after it."""
        made = self._batch
        if made is None or not made[0].place.consumed <= position < made[1].consumed:
            made = self._batch = self._make(self._place_at(position))
        return made

    def _place_at(self, position: int) -> Place:
        """The last place between batches that is not after `position`."""
        at = bisect_right(self._known, position, key=lambda known: known.consumed)
        place = self._known[at - 1] if at else self._start
        while place.consumed + self.split.batch <= position:
            place = self._make(place)[1]
        return place

    def _make(self, place: Place) -> tuple[Batch, Place]:
        made = self.stream.after(place, self.split.batch)
        if made[1].consumed > self._known[-1].consumed:
            self._known = [*self._known[-_MOST_PLACES:], made[1]]
        return made
