"""The ranks of one node together: their operations compared, their states, their memory."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpispeed.base.recorder_file import ranks_text
from mpispeed.base.recorder_words import Kind
from mpispeed.watchdog.compare import Comparer, Mismatch, Vote, key_of, vote_of, voters_of
from mpispeed.watchdog.exits import Groups, MemoryFacts
from mpispeed.watchdog.recorder_reader import Group, Operation, RecorderView
from mpispeed.watchdog.side_channel import Node
from mpispeed.watchdog.tracker import Tracker
from mpispeed.watchdog.wait_graph import RankState

MEMORY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings a watchdog starts with. The limits hold until ranks set others in their recorders.

    `is_run_folder`: the report folder exists in any case. `handles` are descriptors by rank that the watchdog
    inherits: pidfds of the ranks, opened while they lived.
    """

    node: int
    nodes: tuple[Node, ...]
    secret: str
    report_folder: str
    watch_seconds: float
    hang_seconds: float
    is_run_folder: bool = False
    end_code: int = 1
    handles: Mapping[str, int] = field(default_factory=dict)

    @property
    def look_seconds(self) -> float:
        """Operations that take longer are looked at closely."""
        return min(2.0, self.watch_seconds / 4)

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read a file of `write`."""
        given = json.loads(path.read_text())
        nodes = tuple(Node(n["host"], tuple(n["addresses"]), n["port"], tuple(n["ranks"])) for n in given["nodes"])
        return cls(**{**given, "nodes": nodes})

    def write(self, path: Path) -> None:
        """Write as JSON, readable by its own user only, because it contains the secret."""
        nodes = [{"host": n.host, "addresses": n.addresses, "port": n.port, "ranks": n.ranks} for n in self.nodes]
        given = {name: getattr(self, name) for name in self.__slots__}
        path.touch(0o600)
        path.write_text(json.dumps({**given, "nodes": nodes}))


class NodeRanks:
    """All ranks of this node."""

    def __init__(self, paths: Sequence[Path], settings: Settings) -> None:
        self.settings = settings
        views = list(map(RecorderView, paths))
        self.trackers = {view.rank: Tracker(view, settings.handles.get(str(view.rank))) for view in views}
        self.just_ended: list[Tracker] = []
        self.memory: dict[int, tuple[Groups, MemoryFacts]] = {}
        self.oldest_seconds = self.epoch = 0.0
        self._comparer = Comparer()
        self._local = frozenset(self.trackers)
        self._votes: list[dict[str, Any]] = []
        self._own_votes: list[dict[str, Any]] = []
        self._told_groups: set[int] = set()
        self._first_of: dict[int, int | None] = {}
        self._remembered_at = 0.0
        self._looks: dict[int, MemoryFacts] = {}
        self._remember_memory()

    @property
    def have_all_ended(self) -> bool:
        """True if no process is left."""
        return all(tracker.has_ended for tracker in self.trackers.values())

    @property
    def groups(self) -> dict[int, Group]:
        """All groups that a rank of this node has told of."""
        return {key: group for tracker in self.trackers.values() for key, group in tracker.view.groups.items()}

    def look(self) -> Mismatch | None:
        """Read new operations and check for ended processes; return the first operation at which ranks differ."""
        self.just_ended = [tracker for tracker in self.trackers.values() if tracker.poll()]
        self._remember_memory()
        found: Mismatch | None = None
        for tracker in self.trackers.values():
            for operation in tracker.news():
                found = found or self._compare(tracker, operation)
        self.oldest_seconds = self._oldest()
        return found

    def states(self, *, asks: bool) -> dict[int, RankState]:
        """Return the state of each rank; `asks`: ranks in no operation are asked for their place in the program."""
        return {rank: tracker.state(asks=asks) for rank, tracker in self.trackers.items()}

    def take_votes(self) -> list[dict[str, Any]]:
        """Return this node's votes on operations of groups that span nodes, since the last call."""
        votes, self._votes = self._votes, []
        return votes

    def take_own_votes(self) -> list[dict[str, Any]]:
        """Return the same votes for the coordinator on this node."""
        votes, self._own_votes = self._own_votes, []
        return votes

    def take_groups(self) -> list[tuple[int, str, str]]:
        """(key, name, ranks) of groups that have not been told of yet."""
        new = [group for key, group in self.groups.items() if key not in self._told_groups]
        self._told_groups.update(group.key for group in new)
        return [(group.key, group.name, ranks_text(group.ranks)) for group in new]

    def limits(self) -> tuple[float, float]:
        """(seconds until a proven hang is named, seconds until a late rank ends the job), as ranks have set them."""
        views = [tracker.view for tracker in self.trackers.values()]
        watch = [float(view.field("watch_seconds")) for view in views if view.field("watch_seconds") > 0]
        hang = [float(view.field("hang_seconds")) for view in views if view.field("hang_seconds") > 0]
        return max(watch, default=self.settings.watch_seconds), max(hang, default=self.settings.hang_seconds)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _compare(self, tracker: Tracker, operation: Operation) -> Mismatch | None:
        key, group = key_of(tracker.rank, operation), tracker.view.groups.get(operation.comm)
        if key is None or group is None:
            return None
        vote, voters = vote_of(tracker.rank, operation), voters_of(tracker.rank, operation, group)
        if not self._local.issuperset(voters):
            self._tell(key, vote, voters, group, operation)
        differing = self._comparer.add(key, tracker.rank, vote, lambda: self._local.intersection(voters))
        if differing is None:
            return None
        return Mismatch(group.name, operation.seq, differing, operation.kind is not Kind.COLLECTIVE)

    def _tell(
        self, key: tuple[Any, ...], vote: Vote, voters: Sequence[int], group: Group, operation: Operation
    ) -> None:
        """Vote once for the node; its other ranks are compared with that vote here."""
        if operation.kind is Kind.COLLECTIVE:
            first = self._first_of.setdefault(operation.comm, min(self._local.intersection(voters), default=None))
            if vote.rank != first:
                return
        told = {
            "key": list(key),
            "vote": [vote.rank, vote.sig, vote.text, vote.site],
            "group": group.name,
            "seq": operation.seq,
            "ranks": list(voters) if operation.kind is not Kind.COLLECTIVE else [],
            "comm": operation.comm,
        }
        self._votes.append(told)
        self._own_votes.append(told)

    def _oldest(self) -> float:
        """Time since which a main thread of this node has waited for one thing."""
        now = time.monotonic()
        begins = [tracker.view.blocked_since() for tracker in self.trackers.values() if not tracker.has_ended]
        return max((now - max(begin, self.epoch) for begin in begins if begin), default=0.0)

    def begin_anew(self) -> None:
        """Let nothing count as having waited since before now: the node was suspended, or this process was."""
        self.epoch = time.monotonic()
        for tracker in self.trackers.values():
            tracker.epoch = self.epoch

    def _remember_memory(self) -> None:
        """Look at the memory of processes while they live.

        Kills are counted from the look before: one may come between a kill and the end of the process.
        """
        now = time.monotonic()
        if now - self._remembered_at < MEMORY_SECONDS and self._remembered_at:
            return
        self._remembered_at = now
        for rank, tracker in self.trackers.items():
            if not tracker.has_ended:
                groups = self.memory[rank][0] if rank in self.memory else Groups.of(tracker.view.pid)
                facts = groups.facts(tracker.view.pid)
                before = self._looks.get(rank, facts)
                self.memory[rank] = groups, replace(facts, kills=before.kills, node_kills=before.node_kills)
                self._looks[rank] = facts
