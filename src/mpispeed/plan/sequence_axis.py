"""The sequence axis: the ranks that share each sequence, the inner part of the data axis.

ZeRO shards over data, that is over batch x sequence; samples are counted over batch alone. Sources: Jacobs et al.,
DeepSpeed Ulysses (arXiv 2309.14509), section 3; Liu et al., Ring Attention (arXiv 2310.01889); both together as in
Fang and Zhao, USP (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpispeed.base.errors import TopologyError
from mpispeed.mesh.mesh import Factor

BATCH, SEQUENCE = "batch", "sequence"
ULYSSES, RING = "sequence.ulysses", "sequence.ring"
_KEY = "sequence_parallel_size"


@dataclass(frozen=True, slots=True)
class SequenceAxis:
    """Ranks that share each sequence: `ring` places of `ulysses` neighbours each."""

    size: int = 1
    ring: int = 1

    @property
    def ulysses(self) -> int:
        """Neighbours that exchange heads for sequence."""
        return self.size // self.ring

    def check(self, data: int) -> None:
        """Refuse sizes that do not divide each other; `data` is the size of the whole data axis.

        Raises:
            TopologyError: the ring does not divide the axis, or the axis not the ranks.
        """
        if data % self.size:
            msg = (
                f"{_KEY} {self.size} does not divide the {data} ranks that are left after pipeline stages and slices; "
                f"use one of {_divisors(data)}"
            )
            raise TopologyError(msg)
        if self.size % self.ring:
            msg = (
                f"sequence_parallel.ring_size {self.ring} does not divide {_KEY} {self.size}; "
                f"use one of {_divisors(self.size)}"
            )
            raise TopologyError(msg)

    def factors(self) -> tuple[Factor, ...]:
        """The parts of the data axis; none if no sequence is cut."""
        if self.size == 1:
            return ()
        inner = Factor(ULYSSES, self.ulysses, f"{_KEY} / sequence_parallel.ring_size")
        return Factor(SEQUENCE, self.size, _KEY, rest=BATCH), inner

    def rings(self) -> tuple[tuple[str, str, str], ...]:
        """The axis around which keys and values travel, as `Placing.rings` has it."""
        return ((RING, SEQUENCE, ULYSSES),) if self.size > 1 else ()


def uncut_names(aliases: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The names of the axis where no sequence is cut: batch is data, and the others are no axes."""
    return {BATCH: tuple(aliases.get("data", ("data",))), SEQUENCE: (), ULYSSES: (), RING: ()}


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
