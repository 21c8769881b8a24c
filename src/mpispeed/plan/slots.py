"""Slots: the micro-batches of a global batch, numbered without regard to the ranks that compute them. Pure.

With `reduction` "invariant" slot i has fixed samples, seeds of its own, and a fixed place in the tree of sums, so that
losses and gradients do not depend on how many ranks there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpispeed.base.errors import ConfigError
from mpispeed.config.batch import require_dividing_ranks


@dataclass(frozen=True, slots=True)
class Slots:
    """The slot that each rank computes in each micro-step, and the leaf of its gradient in the tree of sums.

    Attributes:
        count: slots of a global batch, train_batch_size / train_micro_batch_size_per_gpu.
        ranks: size of the batch axis; divides `count`.
        in_turn: neighbouring slots go to neighbouring ranks, so that each micro-step completes a run of leaves; else
            each rank has a run of slots, whose gradients it can add up by itself.
        together: neighbouring ranks of the batch axis whose slots are computed at once, as by experts that are spread
            over them; divides `ranks`.
        sequence: ranks that share each slot, each of which has a part of its gradient.
    """

    count: int
    ranks: int
    in_turn: bool
    together: int = 1
    sequence: int = 1

    def __post_init__(self) -> None:
        require_dividing_ranks(self.count, self.ranks, "train_batch_size / train_micro_batch_size_per_gpu")
        if self.ranks % self.together:
            msg = (
                f'reduction "invariant": groups of {self.together} ranks compute together, and {self.ranks} '
                "data-parallel ranks are no multiple of them; start a multiple"
            )
            raise ConfigError(msg)

    @property
    def per_rank(self) -> int:
        """Slots of each rank: micro-steps of an update."""
        return self.count // self.ranks

    @property
    def blocks(self) -> int:
        """Runs of `together` slots that are computed at once."""
        return self.count // self.together

    @property
    def lanes(self) -> int:
        """Parts of a block, each of which always comes from a rank at the same place of its group."""
        return self.together * self.sequence

    @property
    def leaves(self) -> int:
        """Leaves of the tree of sums."""
        return self.lanes * self.blocks

    def block(self, rank: int, micro_step: int) -> int:
        """The block that `rank` of the batch axis computes a part of in a micro-step of an update, from 0."""
        groups, group = self.ranks // self.together, rank // self.together
        return micro_step * groups + group if self.in_turn else group * self.per_rank + micro_step

    def slot(self, rank: int, micro_step: int) -> int:
        """The slot that `rank` of the batch axis computes in a micro-step of an update, from 0."""
        return self.block(rank, micro_step) * self.together + rank % self.together

    def leaf(self, rank: int, micro_step: int, part: int = 0) -> int:
        """The leaf of its gradient; `part`: place on the sequence axis. Lane by lane, so that runs stay runs."""
        return self.lane(rank, part) * self.blocks + self.block(rank, micro_step)

    @property
    def scale(self) -> float:
        """Factor of the sum of the gradients of all slots: their mean, over ranks that share each slot too."""
        return 1.0 / (self.count * self.sequence)

    def leaves_of(self, distinct: int = 1) -> list[list[int]]:
        """The leaves of each rank of the data axis, or of every `distinct`-th of them, by micro-step.

        Args:
            distinct: neighbours on the data axis that have parameters of their own, as experts; each of them has the
                gradient of all that they compute at once.

        Raises:
            ConfigError: groups of different sizes do not nest.
        """
        if self.lanes % distinct:
            msg = (
                f'reduction "invariant": groups of {distinct} ranks with parameters of their own do not nest in those '
                f"of {self.lanes} ranks that compute together; use sizes of experts that divide each other"
            )
            raise ConfigError(msg)
        found = []
        for place in range(0, self.ranks * self.sequence, distinct):
            rank, part = divmod(place, self.sequence)
            lane = self.lane(rank, part) if distinct == 1 else place % self.lanes // distinct
            found.append([lane * self.blocks + self.block(rank, step) for step in range(self.per_rank)])
        return found

    def lane(self, rank: int, part: int = 0) -> int:
        """The lane of a rank of the batch axis at a place of the sequence axis."""
        return part * self.together + rank % self.together
