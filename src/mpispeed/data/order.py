"""Orders of batches: which samples a rank of the data axis takes, in which micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mpispeed.base.errors import ConfigError
from mpispeed.data.sampler import RankBatches, SampleOrder, SlotBatches

log = logging.getLogger(__name__)


class BatchOrder(Protocol):
    """The micro-batches of one rank, as lists of indices of a map-style data set, in epochs.

    A place is a pair `(epoch, offset)`; `offset` counts the samples that the whole data axis has taken since the
    epoch began, so it is the same on all ranks. All methods but `load_state_dict` are pure: batches are read ahead of
    training, and read again after a state was loaded. What training may change is asked for by position.
    """

    @property
    def length(self) -> int:
        """Samples of an epoch, over all ranks; an `offset` beyond it (fill-up) does not count for the position."""

    def count(self, epoch: int, offset: int) -> int:
        """Micro-batches of each rank from a place to the end of its epoch; an epoch without any is behind the last."""

    def batches(self, epoch: int, offset: int) -> Iterable[list[int]]:
        """Those micro-batches of this rank."""

    def state_dict(self, position: int) -> dict[str, Any]:
        """What defines the stream of samples from `position` (epoch * length + offset) on, beside the position."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if `load_state_dict` cannot take the state of a loader; changes nothing.

        Raises:
            ConfigError: it is of other data.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the stream of the state of a loader, which has `position` and `epoch` too."""


class EpochOrder:
    """Epochs of all samples of a data set, shuffled or not: the order of `training_data`.

    Micro-step `k` of an epoch takes `micro_batch * size` consecutive positions of `samples`, and rank `r` the `r`-th
    slice of them. The last block is filled up from the beginning of the epoch to a multiple of `unit`, or left out.

    With `slot_of` an update takes `unit` consecutive positions, of which slot `i` has the `i`-th `micro_batch`, and
    rank `r` the slot `slot_of(k)` in micro-step `k` of the update.
    """

    def __init__(
        self,
        samples: SampleOrder,
        *,
        micro_batch: int,
        rank: int,
        size: int,
        unit: int,
        drop_last: bool,
        epochs: int | None = None,
        slot_of: Callable[[int], int] | None = None,
    ) -> None:
        """Args: `unit` is a multiple of `micro_batch * size`, in samples; after `epochs` there are no more batches."""
        self.samples = samples
        self._micro_batch, self._rank, self._size, self._unit = micro_batch, rank, size, unit
        self._drop_last, self._epochs, self._slot_of = drop_last, epochs, slot_of
        self._base = 0, 0  # epoch and offset at which an update began that was not counted from the epoch's begin

    @property
    def length(self) -> int:
        """As `BatchOrder.length`."""
        return self.samples.length

    def count(self, epoch: int, offset: int) -> int:
        """As `BatchOrder.count`."""
        if self._epochs is not None and epoch >= self._epochs:
            return 0
        base = self._base_of(epoch, offset)
        left = self.length - min(base, self.length)
        units = left // self._unit if self._drop_last else -(-left // self._unit)
        return max(0, units * self._each - (offset - base) // self._block)

    @property
    def _block(self) -> int:
        return self._micro_batch * self._size

    @property
    def _each(self) -> int:
        return self._unit // self._block

    def _base_of(self, epoch: int, offset: int) -> int:
        """The place from which whole updates are counted: `offset` itself where slots do not matter."""
        if self._slot_of is None:
            return offset
        known, base = self._base
        return base if known == epoch and base <= offset else 0

    def batches(self, epoch: int, offset: int) -> RankBatches | SlotBatches:
        """As `BatchOrder.batches`."""
        if self._slot_of is not None:
            base = self._base_of(epoch, offset)
            return SlotBatches(
                self.samples,
                epoch=epoch,
                base=base,
                done=(offset - base) // self._block,
                count=self.count(epoch, offset),
                micro_batch=self._micro_batch,
                each=self._each,
                unit=self._unit,
                slot_of=self._slot_of,
            )
        return RankBatches(
            self.samples,
            epoch=epoch,
            offset=offset,
            count=self.count(epoch, offset),
            micro_batch=self._micro_batch,
            rank=self._rank,
            size=self._size,
        )

    def state_dict(self, position: int) -> dict[str, Any]:
        """As `BatchOrder.state_dict`."""
        return {"length": self.length, "seed": self.samples.seed, "shuffle": self.samples.shuffle}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """As `BatchOrder.check_state`."""
        require_length(state, self.length)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `BatchOrder.load_state_dict`; seed and shuffling of the state win, because they define the stream."""
        found, wanted = (self.samples.seed, self.samples.shuffle), (state["seed"], state["shuffle"])
        if found != wanted:
            log.warning("sample order (seed, shuffle) is %s as saved, not %s, to continue its stream", wanted, found)
            self.samples = SampleOrder(self.length, *wanted)
        self._base = divmod(state["position"], max(1, self.length))


def require_length(state: Mapping[str, Any], length: int | None) -> None:
    """Refuse the state of a loader of a data set of another length, or of another kind; None: a stream.

    Raises:
        ConfigError: it is.
    """
    if state.get("length") != length:
        msg = (
            f"the saved position {state['position']} is of a data set of {_describe(state.get('length'))}, but "
            f"the training data has {_describe(length)}; give the same data, or begin it anew with "
            "load_checkpoint(..., load_data_state=False)"
        )
        raise ConfigError(msg)


def _describe(length: int | None) -> str:
    return "unknown length (a stream)" if length is None else f"{length} samples"
