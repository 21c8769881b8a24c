"""Losses of a global batch whose micro-batches are slots: summed in a tree over the numbers of the slots.

So the mean has the same bits at any number of ranks. Nothing is divided before the end.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from mpispeed.base.device import Readback
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Topology
    from mpispeed.plan.slots import Slots


def tree_mean(values: Sequence[float]) -> float:
    """The mean in doubles: neighbours are added, an odd one passes up, and so on; the sum is times 1 / count."""
    rest = list(values)
    while len(rest) > 1:
        pairs = [a + b for a, b in zip(rest[::2], rest[1::2], strict=False)]
        rest = [*pairs, *rest[2 * len(pairs) :]]
    return rest[0] * (1.0 / len(values))


def slot_means(slots: Slots, data: Comm, rows: Sequence[Sequence[float]]) -> list[float]:
    """Means over all slots of several losses, of each of which a row has the values of this rank's micro-steps.

    Collective over: the data axis, batch x sequence.
    """
    everyone = data.gather_objects([list(row) for row in rows])
    found = []
    for row in range(len(rows)):
        leaves = sorted(
            (slots.slot(place // slots.sequence, micro_step) * slots.sequence + place % slots.sequence, value)
            for place, own in enumerate(everyone)
            for micro_step, value in enumerate(own[row])
        )
        found.append(tree_mean([value for _, value in leaves]))
    return found


def mean_of(losses: Sequence[float | Readback], of_all: SlotLosses | None) -> float:
    """The mean loss of a batch: that over all slots where it is known, else the sum of this rank's shares."""
    return sum(map(float, losses)) if of_all is None or of_all.mean is None else of_all.mean


class SlotLosses:
    """Losses of the slots of this rank, told to all ranks after the norm; see `SentNumbers`.

    Attributes:
        mean: of the last update; None where the loss of a slot is unknown, as of passes that a script starts itself.
    """

    def __init__(self, slots: Callable[[], Slots | None], topology: Topology) -> None:
        """Args: `slots` gives the slots of the plan."""
        self._slots, self._topology = slots, topology
        self._own: list[tuple[int, float | Readback]] = []
        self._unknown = 0
        self.mean: float | None = None

    def add(self, micro_step: int, loss: float | Readback) -> None:
        """Note the loss of a backward pass; those of one micro-step are added."""
        self._own.append((micro_step, loss))

    def is_wanted(self) -> bool:
        """Always, so that no rank has to ask another."""
        return True

    def give(self) -> Sequence[float]:
        """The losses of this rank's slots in the order of its micro-steps, and how many of them are unknown."""
        slots, own, self._own = self._needed(), self._own, []
        found: list[float | None] = [None] * slots.per_rank
        for micro_step, loss in own:
            if micro_step < slots.per_rank:
                before = found[micro_step]
                found[micro_step] = float(loss) if before is None else before + float(loss)
        return [*(math.nan if loss is None else loss for loss in found), float(found.count(None))]

    def take(self, table: torch.Tensor) -> None:
        """As `SentNumbers.take`."""
        slots, topology = self._needed(), self._topology
        of_leaf: dict[int, float] = {}
        is_known = True
        for rank, (*losses, unknown) in enumerate(table.tolist()):
            if topology.index(rank, "model"):
                continue  # slices have the same losses
            is_known = is_known and not unknown
            for micro_step, loss in enumerate(losses):
                # parts of a slot side by side: those of a sequence are ranks of their own
                slot = slots.slot(topology.index(rank, "batch"), micro_step)
                of_leaf[slot * slots.sequence + topology.index(rank, "sequence")] = loss
        self.mean = tree_mean([of_leaf[leaf] for leaf in range(len(of_leaf))]) if is_known else None

    def drop(self) -> None:
        """Forget the losses of a batch that is not used."""
        self._own.clear()

    def _needed(self) -> Slots:
        slots = self._slots()
        if slots is None:
            msg = "losses of slots without slots"
            raise TypeError(msg)
        return slots
