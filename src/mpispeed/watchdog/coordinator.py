"""Judges all ranks of the job from the states of this node and those that the watchdogs of other nodes send."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpispeed.base.recorder_file import ranks_of
from mpispeed.watchdog import report as reports
from mpispeed.watchdog.compare import Comparer, Mismatch, Vote
from mpispeed.watchdog.node_ranks import NodeRanks, Settings
from mpispeed.watchdog.recorder_reader import Group
from mpispeed.watchdog.side_channel import HEADS, SideChannel
from mpispeed.watchdog.wait_graph import Judgement, RankState, judge

SILENT_SECONDS = 10.0
"""A node that has been silent for so long is lost, if ranks here wait for it."""

LOST_SECONDS = 20.0
GONE_SECONDS = 10.0
"""Time that others wait for a rank that has left or died, if a proven hang is not named sooner."""

NAMED_EARLIER = 0.9
"""Share of the limit after which a hang is named, because looking and reporting take time as well."""

UNKNOWN = "an unknown place (nothing is heard of the watchdog of its node)"
CONNECT_SECONDS = 20.0
FRESH_SECONDS = 3.5
LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """A report to make; `ends`: it ends the job, `is_own`: this node makes it though it does not speak for the job."""

    report: reports.Report
    ends: bool = True
    is_own: bool = False


class Notices:
    """Intervals between notices of a wait: each comes after twice the time of the one before."""

    def __init__(self) -> None:
        self._last_seconds = 0.0

    def is_due(self, seconds: float, first_seconds: float = 0.0) -> bool:
        """True if the wait, which has lasted `seconds`, is to be reported now; it counts as reported then."""
        if seconds < self._last_seconds:  # another wait is the oldest now
            self._last_seconds = 0.0
        if seconds < (2 * self._last_seconds or first_seconds):
            return False
        self._last_seconds = seconds
        return True


class Coordinator:
    """Judges the job, one per watchdog; only that of the first node that is alive speaks."""

    def __init__(self, settings: Settings, node_ranks: NodeRanks) -> None:
        self.settings, self._node_ranks = settings, node_ranks
        self.channel: SideChannel | None = None
        self._remote: dict[int, tuple[float, dict[int, RankState]]] = {}
        self._ended: set[int] = set()
        self._groups: dict[int, Group] = {}
        self._wanted: dict[int, float] = {}
        self._comparer = Comparer()
        self._late_notices, self._slow_notices = Notices(), Notices()
        self._began_at = time.monotonic()
        self._looked_at = self._ending_since = 0.0
        self._node_of = {rank: number for number, node in enumerate(settings.nodes) for rank in node.ranks}

    @property
    def is_speaker(self) -> bool:
        """True if this node speaks for the job: no coordinating node of a lower number is alive."""
        heads = range(min(HEADS, self.settings.node))
        return self.channel is None or not any(self._speaks(head) for head in heads)

    @property
    def is_attentive(self) -> bool:
        """True if an operation of some node takes long, so that all nodes have to send the states of their ranks."""
        now = time.monotonic()
        near = self._node_ranks.oldest_seconds > self.settings.look_seconds
        return near or any(now - at < FRESH_SECONDS for at in self._wanted.values())

    def take(self, node: int, message: Mapping[str, Any]) -> Mismatch | None:
        """Take a message of another node; return a mismatch that it shows."""
        now = time.monotonic()
        if message.get("states"):
            states = [RankState.from_json(packed) for packed in message["states"]]
            self._remote[node] = (now, {state.rank: state for state in states})
        if message.get("attention"):
            self._wanted[node] = now
        if message.get("ended"):
            self._ended.add(node)
        for key, name, ranks in message.get("groups", ()):
            self._groups[key] = Group(key, name, ranks_of(ranks))
        return self._count_votes(node, message.get("votes", ()))

    def judge(self, now: float) -> Iterator[Verdict]:
        """Yield the verdicts that are due now."""
        if self.channel is not None:
            own = [self._vote(packed, self.settings.node) for packed in self._node_ranks.take_own_votes()]
            for mismatch in filter(None, own):
                yield Verdict(reports.of_mismatch(mismatch.text(), [v.rank for v in mismatch.votes], mismatch.group))
                return
        if not self.is_attentive or now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        if not self.is_speaker:
            return
        yield from self._judge_all()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _judge_all(self) -> Iterator[Verdict]:
        states, lost = self._all_states()
        if any(state.is_ending for state in states.values()):
            self._ending_since = self._ending_since or time.monotonic()
            if time.monotonic() - self._ending_since < GONE_SECONDS:
                return
        groups = {**self._groups, **self._node_ranks.groups}
        found = judge(
            states, lambda key: groups[key].ranks if key in groups else None, least_seconds=self.settings.look_seconds
        )
        watch_seconds, hang_seconds = self._node_ranks.limits()
        if lost and self._waits_for(found, lost) and self._node_ranks.oldest_seconds > LOST_SECONDS:
            yield self._lost(found, states, lost)
        elif found.stuck and not self._waits_for(found, lost):
            limit = NAMED_EARLIER * watch_seconds
            if found.stuck_seconds > (min(limit, GONE_SECONDS) if found.has_gone else limit):
                yield Verdict(reports.of_hang(found, states, found.stuck_seconds))
        elif found.waiting:
            yield from self._late(found, states, watch_seconds, hang_seconds)
        elif found.slow and found.slow_seconds > watch_seconds:
            yield from self._slow(found, states, hang_seconds)

    def _late(
        self, found: Judgement, states: Mapping[int, RankState], watch_seconds: float, hang_seconds: float
    ) -> Iterator[Verdict]:
        seconds = found.waiting_seconds
        if seconds >= hang_seconds:
            yield Verdict(reports.of_late(found, states, ends=True, limit_seconds=hang_seconds))
        elif self._late_notices.is_due(seconds, watch_seconds):
            yield Verdict(reports.of_late(found, states, ends=False, limit_seconds=hang_seconds), ends=False)

    def _slow(self, found: Judgement, states: Mapping[int, RankState], hang_seconds: float) -> Iterator[Verdict]:
        seconds = found.slow_seconds
        if seconds >= hang_seconds:
            yield Verdict(reports.of_slow(found, states, ends=True, limit_seconds=hang_seconds))
        elif self._slow_notices.is_due(seconds):
            yield Verdict(reports.of_slow(found, states, ends=False, limit_seconds=hang_seconds), ends=False)

    def _lost(self, found: Judgement, states: Mapping[int, RankState], lost: Sequence[int]) -> Verdict:
        nodes = [self.settings.nodes[number] for number in lost]
        seconds = max(self._silent(number) for number in lost)
        ranks = [rank for node in nodes for rank in node.ranks]
        named = [*found.stuck, *found.waiting]
        report = reports.of_lost_node([node.host for node in nodes], ranks, seconds, states, named)
        return Verdict(report, is_own=True)

    def _all_states(self) -> tuple[dict[int, RankState], list[int]]:
        """States of all ranks, and the nodes that are lost; a rank without a known state may do anything."""
        states = self._node_ranks.states(asks=True)
        lost = []
        for number, node in enumerate(self.settings.nodes):
            if number == self.settings.node:
                continue
            at, known = self._remote.get(number, (0.0, {}))
            if self._is_lost(number):
                lost.append(number)
                known = {
                    rank: RankState(rank, gone="is on a node that is not heard of", is_dead=True) for rank in node.ranks
                }
            elif time.monotonic() - at > FRESH_SECONDS:
                known = {}
            states.update({rank: known.get(rank, RankState(rank, place=UNKNOWN)) for rank in node.ranks})
        return states, lost

    def _waits_for(self, found: Judgement, lost: Sequence[int]) -> bool:
        return any(self._node_of.get(other) in lost for others in found.waits_on.values() for other in others)

    def _speaks(self, node: int) -> bool:
        """True if a coordinating node before this one can speak for the job; at the start it has a while to connect."""
        if self.channel is None or node in self._ended:
            return False
        peer = self.channel.peers[node]
        if peer.said_bye:
            return False
        if not peer.was_connected:
            return time.monotonic() - self._began_at < CONNECT_SECONDS
        return self._silent(node) < SILENT_SECONDS

    def _silent(self, node: int) -> float:
        return self.channel.silent_seconds(node) if self.channel is not None and node in self.channel.peers else 0.0

    def _is_lost(self, node: int) -> bool:
        """A node whose watchdog ended in good order, or refuses, is there; so is one that never talks to this one."""
        if self.channel is None or not self.channel.talks_to(node):
            return False
        peer = self.channel.peers[node]
        return peer.was_connected and not (peer.is_closed or peer.refused) and self._silent(node) > SILENT_SECONDS

    def _count_votes(self, node: int, votes: Sequence[Mapping[str, Any]]) -> Mismatch | None:
        if self.settings.node >= HEADS:
            return None
        return next(filter(None, [self._vote(packed, node) for packed in votes]), None)

    def _vote(self, packed: Mapping[str, Any], node: int) -> Mismatch | None:
        rank, sig, text, site = packed["vote"]
        ranks = packed["ranks"] or self._ranks_of(packed["comm"])
        key, vote = tuple(packed["key"]), Vote(rank, sig, text, site)
        differing = self._comparer.add(key, node, vote, lambda: {self._node_of[member] for member in ranks})
        if differing is None:
            return None
        return Mismatch(packed["group"], packed["seq"], differing, bool(packed["ranks"]))

    def _ranks_of(self, comm: int) -> Sequence[int]:
        group = self._node_ranks.groups.get(comm) or self._groups.get(comm)
        return group.ranks if group is not None else ()
