"""Placements of model states, and the collectives that lead from one to another. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mpispeed.base.errors import StoreError


class Tier(enum.Enum):
    """Kind of memory that holds a state."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True)
class Placement:
    """The axes over which a state is sharded, innermost hardware axis first, and the tier that holds it.

    One placement is a prefix of another when its axes begin the other's: `() < ("data",)`.
    """

    axes: tuple[str, ...] = ()
    tier: Tier = Tier.DEVICE

    @property
    def is_replicated(self) -> bool:
        """True if replicated: every rank holds all of it."""
        return not self.axes


REPLICATED = Placement()


@dataclass(frozen=True, slots=True)
class Move:
    """One collective (or local slice) on the way from one placement to another."""

    verb: str  # "reduce_scatter", "all_reduce", "all_gather" or "cut"
    axes: tuple[str, ...]


def _is_prefix(short: tuple[str, ...], long: tuple[str, ...]) -> bool:
    return long[: len(short)] == short


def reduce_moves(partial: tuple[str, ...], target: Placement) -> tuple[Move, ...]:
    """Collectives that turn full buffers of partial sums over `partial` into `target`.

    Raises:
        StoreError: the target is sharded over an axis that holds no partial sums.
    """
    foreign = [axis for axis in target.axes if axis not in partial]
    if foreign:
        msg = f"cannot reduce partial sums over {partial} into a cut over {foreign}: those ranks hold other sums"
        raise StoreError(msg)
    rest = tuple(axis for axis in partial if axis not in target.axes)
    moves = [Move("reduce_scatter", (axis,)) for axis in target.axes]
    if rest:
        moves.append(Move("all_reduce", rest))
    return tuple(moves)


def moves(source: Placement, target: Placement) -> tuple[Move, ...]:
    """Collectives that lead from `source` to `target` when all values are already summed.

    Raises:
        StoreError: neither placement is a prefix of the other.
    """
    if _is_prefix(target.axes, source.axes):
        dropped = source.axes[len(target.axes) :]
        return tuple(Move("all_gather", (axis,)) for axis in reversed(dropped))
    if _is_prefix(source.axes, target.axes):
        return tuple(Move("cut", (axis,)) for axis in target.axes[len(source.axes) :])
    msg = f"no move leads from a cut over {source.axes} to a cut over {target.axes}: neither begins the other"
    raise StoreError(msg)
