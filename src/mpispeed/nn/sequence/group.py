"""The ranks that share one sequence: the whole axis, its inner factor (Ulysses) and its outer one (ring)."""

from __future__ import annotations

from dataclasses import dataclass

from mpispeed.base.errors import TopologyError
from mpispeed.mesh.comm import Comm


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Three groups of ranks of one sequence axis.

    Attributes:
        comm: all ranks of the axis; rank r is ring place r // ulysses.size, inner place r % ulysses.size.
        ulysses: the ranks of this rank's ring place, which exchange heads for tokens.
        ring: the ranks of this rank's inner place, between which keys and values travel.
    """

    comm: Comm
    ulysses: Comm
    ring: Comm

    def __post_init__(self) -> None:
        """Check that the groups belong together.

        Raises:
            TopologyError: the factors do not multiply to the axis, or lie otherwise in it.
        """
        sizes = f"{self.ulysses.size} x {self.ring.size} ranks"
        if self.ulysses.size * self.ring.size != self.comm.size:
            msg = f"a sequence axis of {self.comm.size} ranks does not have the factors {sizes} (Ulysses x ring)"
            raise TopologyError(msg)
        if self.ring.rank * self.ulysses.size + self.ulysses.rank != self.comm.rank:
            msg = (
                f"rank {self.comm.rank} of the sequence axis is place {self.ulysses.rank} of Ulysses and place "
                f"{self.ring.rank} of the ring: Ulysses ranks have to be neighbours in the axis ({sizes})"
            )
            raise TopologyError(msg)

    @classmethod
    def split(cls, comm: Comm, ring_size: int = 1) -> SequenceGroup:
        """Groups of an axis whose outer factor is `ring_size`; with 1 all of it is Ulysses.

        Collective over: `comm`.

        Raises:
            TopologyError: `ring_size` does not divide the ranks.
        """
        if ring_size < 1 or comm.size % ring_size:
            msg = f"ring_size {ring_size} does not divide the {comm.size} ranks of the sequence axis"
            raise TopologyError(msg)
        inner = comm.size // ring_size
        place, own = divmod(comm.rank, inner)
        ulysses = comm.split(place, comm.ranks[place * inner : (place + 1) * inner], ("sequence.ulysses",))
        ring = comm.split(own, comm.ranks[own::inner], ("sequence.ring",))
        return cls(comm, ulysses, ring)

    @property
    def size(self) -> int:
        """Ranks of the axis."""
        return self.comm.size

    @property
    def rank(self) -> int:
        """Place of this rank in the axis."""
        return self.comm.rank
