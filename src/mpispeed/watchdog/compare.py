"""Finds operations at which ranks came with different verbs, sizes, dtypes or roots, whether or not anything hangs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from mpispeed.base.recorder_words import Kind
from mpispeed.watchdog.recorder_reader import Group, Operation

MOST_PENDING = 100_000
"""Operations that are remembered until all voters have come; a voter that never comes must not fill the memory."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's operation, from its recorder or told by another node. `sig` has to be equal on all."""

    rank: int
    sig: int
    told: str = ""
    told_site: str = ""
    operation: Operation | None = None

    @property
    def text(self) -> str:
        """The operation in words; formatted on demand, because few votes are ever reported."""
        return self.told if self.operation is None else self.operation.text()

    @property
    def site(self) -> str:
        """The place of the call."""
        return self.told_site if self.operation is None else self.operation.site


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Two ranks called different operations at one place in their order. `group` is its name; `seq` counts from 1."""

    group: str
    seq: int
    votes: tuple[Vote, ...]
    is_message: bool = False

    def text(self) -> str:
        """The mismatch in words: the operation and the place of each rank's call."""
        told = "; ".join(f"rank {vote.rank} came with {vote.text} at {vote.site or '?'}" for vote in self.votes)
        if self.is_message:
            return f"message {self.seq} between two ranks over {self.group} has two sizes: {told}"
        return f"operation {self.seq} over {self.group} is not the same on all ranks: {told}"


@dataclass(slots=True)
class _Pending:
    first: Vote
    missing: set[Hashable]


class Comparer:
    """Collects votes. A voter is a rank, or a node that votes for its ranks; each votes once for each key."""

    def __init__(self) -> None:
        self._pending: OrderedDict[Hashable, _Pending] = OrderedDict()

    def add(
        self, key: Hashable, voter: Hashable, vote: Vote, voters: Callable[[], Iterable[Hashable]]
    ) -> tuple[Vote, Vote] | None:
        """Count a vote; two votes that differ are returned. `voters` is asked at the first vote for a key."""
        found = self._pending.get(key)
        if found is None:
            missing = set(voters())
            missing.discard(voter)
            if missing:
                self._pending[key] = _Pending(vote, missing)
                if len(self._pending) > MOST_PENDING:
                    self._pending.popitem(last=False)
            return None
        found.missing.discard(voter)
        if not found.missing:
            del self._pending[key]
        return None if found.first.sig == vote.sig else (found.first, vote)


def key_of(rank: int, operation: Operation) -> tuple[Hashable, ...] | None:
    """The key that all ranks of one operation share; None if it is compared elsewhere or not at all.

    Started operations of channels are compared by the ranks themselves, before they are carried out.
    """
    if operation.kind is Kind.COLLECTIVE:
        return (operation.comm, operation.seq)
    if operation.kind is Kind.GATE:
        return None
    source, target = (rank, operation.peer) if operation.kind is Kind.SEND else (operation.peer, rank)
    return (operation.comm, source, target, operation.tag, operation.seq)


def vote_of(rank: int, operation: Operation) -> Vote:
    """Return the vote of a rank; of a message, both sides know only the size."""
    sig = operation.sig if operation.kind is Kind.COLLECTIVE else operation.size_bytes
    return Vote(rank, sig, operation=operation)


def voters_of(rank: int, operation: Operation, group: Group) -> tuple[int, ...]:
    """World ranks that take part in an operation."""
    return group.ranks if operation.kind is Kind.COLLECTIVE else (rank, operation.peer)
