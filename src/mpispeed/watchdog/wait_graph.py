"""Graph of ranks that wait for each other, and deadlocks in it: pure functions of the ranks' states.

A rank can go on if it waits for nothing, or if each operation it waits for is possible: a collective if every member
is in it already or can still reach it, a message if the other side has posted its part or can still post it. The
possible nodes are the least set that is closed under these rules, so ranks that only wait for each other, in
a cycle or for one that is gone, are not in it: they are stuck. A channel of started operations is judged like
a rank, beside the main thread that feeds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpispeed.base.recorder_words import MAIN, Kind

Members = Callable[[int], Sequence[int] | None]
"""World ranks of the group with a key; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Doing:
    """An operation that a rank is in. `text` names it, `site` is the caller's place; `age_seconds` since it began.

    `is_seen` is False where it is not known whether the main thread waits for it: that proves no deadlock.
    """

    comm: int
    kind: int
    seq: int
    peer: int
    tag: int
    thread: int
    is_posted: bool
    age_seconds: float
    text: str
    site: str
    group: str = ""
    is_seen: bool = True


@dataclass(slots=True)
class RankState:
    """Known state of a rank.

    `gone` is the reason why its main thread will do nothing any more, or empty; its channels still end what was started
    before, unless it `is_dead`. `blocking` has the operations that its main thread is in or waits
    for, `lanes` those of each channel's thread, the first one first. Counts are of operations that have begun:
    `entered` collectives and `submitted` and `gates` (posted) started operations by group, `sends` and `recvs` by
    (group, peer, tag). `place` is the main thread's place, if it was asked. `is_ending` is True if the rank has an
    error and ends the job itself, `is_open` if it has threads or operations that the recorder does not show fully,
    so that it may do anything. It has begun no operation and ended no step for `idle_seconds`.
    """

    rank: int
    gone: str = ""
    blocking: list[Doing] = field(default_factory=list)
    lanes: dict[int, list[Doing]] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    submitted: dict[int, int] = field(default_factory=dict)
    gates: dict[int, int] = field(default_factory=dict)
    sends: dict[tuple[int, int, int], int] = field(default_factory=dict)
    recvs: dict[tuple[int, int, int], int] = field(default_factory=dict)
    place: str = ""
    last_site: str = ""
    is_dead: bool = False
    is_ending: bool = False
    is_open: bool = False
    idle_seconds: float = 1e9

    def to_json(self) -> dict[str, Any]:
        """Return a dict for the side channel; keys of mappings become lists."""
        packed = asdict(self)
        for name in ("entered", "submitted", "gates", "lanes"):
            packed[name] = list(packed[name].items())
        for name in ("sends", "recvs"):
            packed[name] = [[list(key), count] for key, count in packed[name].items()]
        return packed

    @classmethod
    def from_json(cls, packed: Mapping[str, Any]) -> RankState:
        """Make a state from `to_json`'s dict."""
        given = dict(packed)
        given["blocking"] = [Doing(**one) for one in given["blocking"]]
        given["lanes"] = {lane: [Doing(**one) for one in found] for lane, found in given["lanes"]}
        for name in ("entered", "submitted", "gates"):
            given[name] = dict(given[name])
        for name in ("sends", "recvs"):
            given[name] = {(key[0], key[1], key[2]): count for key, count in given[name]}
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Result of a look at all ranks.

    `stuck` ranks can never go on; `waits_on` has the ranks that each blocked rank waits for. `late` ranks are in
    no operation though others wait for them; `waiting` ranks wait for them.
    """

    stuck: tuple[int, ...]
    stuck_seconds: float  # since the last of them got stuck
    has_gone: bool  # some of them wait for a rank that is gone
    late: tuple[int, ...]
    waiting: tuple[int, ...]
    waiting_seconds: float
    slow: tuple[int, ...]  # in operations that all members are in
    slow_seconds: float
    waits_on: Mapping[int, tuple[int, ...]]


Node = tuple[int, ...]
"""A node of the graph: a thread as (rank, thread), an operation as (group, kind, number, thread)."""


class _Look:
    """One look at all ranks: the needs of each node, and the nodes that are possible."""

    def __init__(self, states: Mapping[int, RankState], members: Members) -> None:
        self.states, self.members = states, members
        self.alive: set[Node] = set()
        self._needs: dict[Node, list[Node]] = {}
        self._never: set[Node] = set()
        self._missing: dict[Node, tuple[int, ...] | None] = {}

    def solve(self) -> None:
        """Find the least set of nodes whose needs are in it."""
        for state in self.states.values():
            for thread in (MAIN, *state.lanes):
                self._add_thread(state, thread)
        users: dict[Node, list[Node]] = {}
        left = {}
        for node, needs in self._needs.items():
            left[node] = len(needs)
            for need in needs:
                users.setdefault(need, []).append(node)
        todo = [node for node, count in left.items() if not count and node not in self._never]
        while todo:
            node = todo.pop()
            self.alive.add(node)
            for user in users.get(node, ()):
                left[user] -= 1
                if not left[user] and user not in self._never:
                    todo.append(user)

    def missing(self, rank: int, doing: Doing) -> tuple[int, ...] | None:
        """Ranks that have not come to an operation yet; None if its members are not known."""
        if doing.kind in (Kind.SEND, Kind.RECV):
            other = self.states.get(doing.peer)
            if other is None:
                return None
            counts = other.sends if doing.kind == Kind.RECV else other.recvs
            return () if counts.get((doing.comm, rank, doing.tag), 0) >= doing.seq else (doing.peer,)
        key = _operation(doing)
        if key not in self._missing:
            self._missing[key] = self._absent(doing)
        return self._missing[key]

    def blockers(self, rank: int) -> tuple[int, ...]:
        """Ranks that this one waits for; queued in a channel, those that the channel's first operation waits for."""
        state, found = self.states[rank], set[int]()
        for doing in state.blocking:
            ahead = self._heads(state, doing.thread) if doing.kind == Kind.GATE else []
            before = {other for head in ahead for other in self.missing(rank, head) or ()}
            found.update(before or self.missing(rank, doing) or ())
        return tuple(sorted(found - {rank}))

    def is_complete(self, rank: int) -> bool:
        """True if all members are known to have reached the present operation of a rank's main thread."""
        return all(self.missing(rank, doing) == () for doing in self.states[rank].blocking)

    # -- needs -----------------------------------------------------------------------------------------------------

    def _add_thread(self, state: RankState, thread: int) -> None:
        node = (state.rank, thread)
        self._needs[node] = []
        if state.is_dead or (state.gone and thread == MAIN):
            self._never.add(node)
        elif thread == MAIN:
            for doing in () if state.is_open else [doing for doing in state.blocking if doing.is_seen]:
                self._need(node, state.rank, doing)
                if doing.kind == Kind.GATE:
                    self._needs[node].append(self._lane(state.rank, doing.thread))
        else:
            for doing in self._heads(state, thread):
                self._need(node, state.rank, doing)

    def _need(self, node: Node, rank: int, doing: Doing) -> None:
        """Let a thread need its present operation; a gate that is not posted waits for its own rank."""
        if doing.kind == Kind.GATE and not doing.is_posted:
            return
        if doing.kind in (Kind.SEND, Kind.RECV):
            self._needs[node].extend((other, MAIN) for other in self.missing(rank, doing) or ())
            return
        key = _operation(doing)
        self._needs[node].append(key)
        if key not in self._needs:
            self._needs[key] = [self._comer(other, doing) for other in self.missing(rank, doing) or ()]

    def _comer(self, rank: int, doing: Doing) -> Node:
        """The thread that would bring a rank to an operation."""
        is_to_start = doing.kind == Kind.GATE and self.states[rank].submitted.get(doing.comm, 0) < doing.seq
        return (rank, MAIN) if is_to_start or doing.thread == MAIN else self._lane(rank, doing.thread)

    def _lane(self, rank: int, thread: int) -> Node:
        """The thread of a channel; an idle one goes on with what its main thread gives it."""
        return (rank, thread if self.states[rank].lanes.get(thread) else MAIN)

    def _heads(self, state: RankState, thread: int) -> list[Doing]:
        """Present operations of a channel's thread: verbs, and of started operations only the first in the queue."""
        found = state.lanes.get(thread, [])
        gates = [doing for doing in found if doing.kind == Kind.GATE][:1]
        return [*gates, *(doing for doing in found if doing.kind != Kind.GATE)]

    def _absent(self, doing: Doing) -> tuple[int, ...] | None:
        members = self.members(doing.comm)
        if members is None:
            return None
        found = []
        for member in members:
            state = self.states.get(member)
            if state is not None:
                counts = state.gates if doing.kind == Kind.GATE else state.entered
                if counts.get(doing.comm, 0) < doing.seq:
                    found.append(member)
        return tuple(found)


def _operation(doing: Doing) -> Node:
    return (doing.comm, doing.kind, doing.seq, doing.thread)


def judge(states: Mapping[int, RankState], members: Members, *, least_seconds: float = 0.0) -> Judgement:
    """Find ranks that are stuck, late, or wait for late ones. Waits shorter than `least_seconds` do not count."""
    look = _Look(states, members)
    look.solve()
    blocked = [rank for rank, state in states.items() if state.blocking and not state.gone]
    waits_on = {rank: look.blockers(rank) for rank in blocked}
    stuck = tuple(sorted(rank for rank in blocked if (rank, MAIN) not in look.alive))
    alive = [rank for rank in blocked if rank not in stuck and _age(states[rank]) >= least_seconds]
    awaited = {others: None for rank in alive if (others := waits_on[rank])}
    late = {other for others in awaited for other in others if not states[other].blocking}
    idle = {others: _idle(states, late.intersection(others)) for others in awaited}
    waiting = tuple(sorted(rank for rank in alive if idle.get(waits_on[rank]) is not None))
    slow = tuple(sorted(rank for rank in alive if not waits_on[rank] and look.is_complete(rank)))
    return Judgement(
        stuck=stuck,
        stuck_seconds=min((_age(states[rank]) for rank in stuck), default=0.0),
        has_gone=any(states[other].gone for rank in stuck for other in waits_on[rank]),
        late=tuple(sorted(late)),
        waiting=waiting,
        waiting_seconds=max((min(_age(states[rank]), idle[waits_on[rank]] or 0.0) for rank in waiting), default=0.0),
        slow=slow,
        slow_seconds=max((_age(states[rank]) for rank in slow), default=0.0),
        waits_on=waits_on,
    )


def _idle(states: Mapping[int, RankState], late: Iterable[int]) -> float | None:
    """Time since which the longest idle of the late ranks has done nothing; None without late ranks."""
    return max((states[rank].idle_seconds for rank in late), default=None)


def _age(state: RankState) -> float:
    return min((doing.age_seconds for doing in state.blocking), default=0.0)
