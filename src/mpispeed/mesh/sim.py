"""N ranks as threads of one process: the same verbs and algorithms without MPI, for tests.

A rank that fails or never comes ends the run: all waiting ranks get a CommError that names the missing ranks and the
verb.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from mpispeed.base.errors import CommError
from mpispeed.mesh.collectives.group import CommTrace, Group, Limits
from mpispeed.mesh.collectives.transport import Comparison, Pairs, Poll, Source, Transport
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import World

T = TypeVar("T")

_FOLDS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


@dataclass(slots=True)
class _Meeting:
    """One collective call: the values of all ranks, and the number of ranks that have read them."""

    brought: dict[int, tuple[str, Any]] = field(default_factory=dict)
    left: int = 0


class _Machine:
    """State shared by all simulated ranks: one lock, the first failure, the ranks that have ended."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.changed = threading.Condition()
        self.failure: tuple[int, BaseException] | None = None
        self.ended: set[int] = set()
        self.groups: dict[tuple[Any, ...], _Members] = {}

    def fail(self, rank: int, error: BaseException) -> None:
        """Keep the first failure and wake everyone."""
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def end(self, rank: int) -> None:
        """Note that a rank's program has returned."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()

    def wait(self, is_met: Callable[[], bool], missing: Callable[[], Sequence[int]], what: str) -> None:
        """Block, holding the lock, until `is_met`; raise if that can no longer happen."""

        def is_over() -> bool:
            return is_met() or self.failure is not None or any(rank in self.ended for rank in missing())

        in_time = self.changed.wait_for(is_over, self.timeout_seconds)
        if is_met():
            return
        if self.failure is not None:
            rank, error = self.failure
            msg = f"{what}: rank {rank} failed with {type(error).__name__}: {error}"
        elif in_time:
            gone = [rank for rank in missing() if rank in self.ended]
            msg = f"{what}: rank {', '.join(map(str, gone))} ended its program without taking part"
        else:
            late = ", ".join(map(str, missing()))
            msg = f"{what}: rank {late} did not come within {self.timeout_seconds} s"
        raise CommError(msg)


class _Members:
    """State shared by the members of one simulated communicator."""

    def __init__(self, machine: _Machine, key: tuple[Any, ...], ranks: Sequence[int]) -> None:
        self.machine, self.key, self.ranks = machine, key, ranks
        self.turns = [0] * len(ranks)
        self.made = [0] * len(ranks)
        self.compared = [0] * len(ranks)
        self.codes: dict[int, list[int]] = {}
        self.meetings: dict[int, _Meeting] = {}
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = {}

    def meet(self, rank: int, verb: str, value: Any, read: Callable[[list[Any]], T]) -> T:
        """Wait for all members, call `read` on their values, wait until all have read."""
        changed, size = self.machine.changed, len(self.ranks)
        with changed:
            turn = self.turns[rank]
            self.turns[rank] += 1
            meeting = self.meetings.setdefault(turn, _Meeting())
            meeting.brought[rank] = (verb, value)
            changed.notify_all()
            self.machine.wait(
                lambda: len(meeting.brought) == size,
                lambda: [self.ranks[r] for r in range(size) if r not in meeting.brought],
                f"{verb} of ranks {list(self.ranks)}",
            )
        verbs = {self.ranks[r]: name for r, (name, _) in meeting.brought.items()}
        if len(set(verbs.values())) > 1:
            msg = f"ranks of one group call different verbs: {verbs}"
            raise CommError(msg)
        result = read([meeting.brought[r][1] for r in range(size)])
        with changed:
            meeting.left += 1
            changed.notify_all()
            if meeting.left == size:
                del self.meetings[turn]
            self.machine.wait(lambda: meeting.left == size, lambda: (), f"{verb} of ranks {list(self.ranks)}")
        return result

    def put(self, src: int, dst: int, tag: int, x: torch.Tensor) -> None:
        """Leave a copy in the mailbox."""
        with self.machine.changed:
            self.mail.setdefault((src, dst, tag), deque()).append(x.clone())
            self.machine.changed.notify_all()

    def take(self, src: int, dst: int, tag: int, x: torch.Tensor) -> bool:
        """Fill `x` from the mailbox if there is a message. The lock is held by the caller."""
        box = self.mail.get((src, dst, tag))
        if not box:
            return False
        message = box.popleft()
        if message.nbytes != x.nbytes:
            msg = f"rank {self.ranks[src]} sent {message.nbytes} bytes where rank {self.ranks[dst]} expects {x.nbytes}"
            raise CommError(msg)
        x.view(torch.uint8).copy_(message.view(torch.uint8))
        return True


class SimTransport(Transport):
    """Primitives of a group of simulated ranks."""

    def __init__(self, group: _Members, rank: int) -> None:
        super().__init__(rank, len(group.ranks))
        self._group, self._ranks = group, group.ranks
        self._named: dict[tuple[Any, ...], int] = {}

    def _meet(self, verb: str, value: Any, read: Callable[[list[Any]], T]) -> T:
        return self._group.meet(self.rank, verb, value, read)

    def _fold(self, verb: str, x: torch.Tensor, op: str, take: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Reduce from rank 0 upwards, like a naive library, after checking that sizes agree."""

        def read(brought: list[torch.Tensor]) -> torch.Tensor:
            if len({(t.numel(), t.dtype) for t in brought}) > 1:
                msg = f"{verb}: ranks bring different tensors: {[(t.numel(), t.dtype) for t in brought]}"
                raise CommError(msg)
            total = take(brought[0]).numpy().copy()
            for other in brought[1:]:
                total = _FOLDS[op](total, take(other).numpy())
            return torch.from_numpy(total)

        return self._meet(verb, x, read)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Take the own part of everyone's tensor."""
        cut = x.numel() // self.size
        mine = slice(self.rank * cut, (self.rank + 1) * cut)
        out.copy_(self._meet("all_to_all", x, lambda brought: torch.cat([t[mine] for t in brought])))

    def allgather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Take everyone's tensor."""
        out.copy_(self._meet("all_gather", shard, torch.cat))

    def library_all_reduce(self, x: torch.Tensor, op: str) -> None:
        """Fold in place."""
        x.copy_(self._fold("all_reduce", x, op, lambda t: t))

    def library_reduce(self, x: torch.Tensor, root: int, op: str) -> None:
        """Fold on `root`."""
        total = self._fold("reduce", x, op, lambda t: t)
        if self.rank == root:
            x.copy_(total)

    def library_reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, op: str) -> None:
        """Fold this rank's shard."""
        mine = slice(self.rank * shard.numel(), (self.rank + 1) * shard.numel())
        shard.copy_(self._fold("reduce_scatter", full, op, lambda t: t[mine]))

    def library_broadcast(self, x: torch.Tensor, root: int) -> None:
        """Take the root's tensor."""
        x.copy_(self._meet("broadcast", x, lambda brought: brought[root].clone()))

    def exchange_pairs(self, sends: Pairs, recvs: Pairs) -> None:
        """Mail everything, then empty the own boxes."""
        for x, dst in sends:
            self._group.put(self.rank, dst, -1, x)
        for x, src in recvs:
            self.library_recv(x, src, -1)

    def library_send(self, x: torch.Tensor, dst: int, tag: int) -> None:
        """Mail a copy; never waits."""
        self._group.put(self.rank, dst, tag, x)

    def library_recv(self, x: torch.Tensor, src: int, tag: int) -> None:
        """Wait for mail."""
        group = self._group
        taken: list[bool] = []

        def is_met() -> bool:
            if not taken and group.take(src, self.rank, tag, x):
                taken.append(True)
            return bool(taken)

        with group.machine.changed:
            group.machine.wait(is_met, lambda: [self._ranks[src]], f"recv(tag={tag}) on rank {self._ranks[self.rank]}")

    def post_send(self, x: torch.Tensor, dst: int, tag: int) -> Poll:
        """Mail a copy."""
        self._group.put(self.rank, dst, tag, x)
        return lambda: True

    def post_recv(self, x: torch.Tensor, src: int, tag: int) -> Poll:
        """Look into the mailbox."""

        def poll() -> bool:
            with self._group.machine.changed:
                self._raise_failure("recv")
                return self._group.take(src, self.rank, tag, x)

        return poll

    def post_recv_any(self, x: torch.Tensor, tag: int) -> Source:
        """Look into all mailboxes."""

        def poll() -> int | None:
            with self._group.machine.changed:
                self._raise_failure("recv")
                others = (src for src in range(self.size) if src != self.rank)
                return next((src for src in others if self._group.take(src, self.rank, tag, x)), None)

        return poll

    def _raise_failure(self, what: str) -> None:
        failure = self._group.machine.failure
        if failure is not None:
            msg = f"{what}: rank {failure[0]} failed with {type(failure[1]).__name__}: {failure[1]}"
            raise CommError(msg)

    def library_barrier(self) -> None:
        """Meet."""
        self._meet("barrier", None, lambda _: None)

    def library_share(self, obj: Any, root: int) -> Any:
        """The root's object itself, not a copy."""
        return self._meet("share", obj, lambda brought: brought[root])

    def library_gather_objects(self, obj: Any) -> list[Any]:
        """Everyone's object itself, not a copy."""
        return self._meet("gather_objects", obj, list)

    def compare(self, code: int) -> Comparison:
        """Leave the code where all members see it."""
        group = self._group
        with group.machine.changed:
            group.compared[self.rank] += 1
            codes = group.codes.setdefault(group.compared[self.rank], [])
            codes.append(code)
            if len(codes) == self.size:
                del group.codes[group.compared[self.rank]]

        def poll() -> tuple[int, int] | None:
            self._raise_failure("started verb")
            return (min(codes), max(codes)) if len(codes) == self.size else None

        return poll

    def split(self, color: int, ranks: Sequence[int]) -> SimTransport:
        """The n-th group made of this one, by color; needs no meeting."""
        group, own = self._group, self._ranks[self.rank]
        with group.machine.changed:
            key = (*group.key, group.made[self.rank], color)
            group.made[self.rank] += 1
            made = group.machine.groups.setdefault(key, _Members(group.machine, key, ranks))
        return SimTransport(made, list(ranks).index(own))

    def of_members(self, members: Sequence[int], ranks: Sequence[int], name: str) -> SimTransport:
        """The n-th group of that name and these ranks; needs no meeting."""
        group, own = self._group, ranks.index(self._ranks[self.rank])
        with group.machine.changed:
            kind = (*group.key, name, *ranks)
            count = self._named[kind] = self._named.get(kind, 0) + 1
            key = (*kind, count)
            made = group.machine.groups.setdefault(key, _Members(group.machine, key, ranks))
        return SimTransport(made, own)

    def close(self) -> None:
        """Do nothing."""


def run(
    size: int,
    fn: Callable[[World], T],
    *,
    reduction: str = "ordered",
    timeout_seconds: float = 30.0,
    ranks_per_node: int | None = None,
) -> list[T]:
    """Call `fn(world)` on `size` simulated ranks at once and return the results in rank order.

    The first error of any rank ends the run and is raised here.
    """
    machine = _Machine(timeout_seconds)
    group = _Members(machine, (), range(size))
    results: dict[int, T] = {}

    def main(rank: int) -> None:
        try:
            world = _world(group, rank, reduction, ranks_per_node or size)
            results[rank] = fn(world)
            world.close()
        except BaseException as error:
            machine.fail(rank, error)
        finally:
            machine.end(rank)

    threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    with machine.changed:
        machine.changed.wait_for(lambda: machine.failure is not None or len(machine.ended) == size)
    for thread in threads:
        # A rank that computes for ever is left behind as a daemon once another one has failed.
        thread.join(1.0 if machine.failure is not None else None)
    if machine.failure is not None:
        raise machine.failure[1]
    return [results[rank] for rank in range(size)]


def _world(group: _Members, rank: int, reduction: str, ranks_per_node: int) -> World:
    limits, transport = Limits(timeout_seconds=group.machine.timeout_seconds), SimTransport(group, rank)
    comm = Comm(Group(transport, group.ranks, ("world",), reduction, CommTrace(), limits=limits))
    first = rank // ranks_per_node * ranks_per_node
    node = comm.split(first, range(first, min(first + ranks_per_node, comm.size)), ("node",))
    return World(comm, node, node_count=-(-comm.size // ranks_per_node))
