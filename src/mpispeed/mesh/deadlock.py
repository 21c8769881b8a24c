"""Waits that detect deadlocks between ranks within seconds.

A rank that waits too long joins a round: a started gather of the positions of its channels. A rank that computes does
not join, and then nothing happens. Once all have joined, all judge the same reports. They prove that nothing will ever
move if every rank waits for an operation in one of its channels and every channel stands at a gate that some rank has
not come to: a gate opens only when the last rank posts it, and a rank posts nothing while it waits at a gate itself.
Reports are taken at different times and may be old, without harm: the first channel to move after its own report would
have done so through a gate that all had posted, and their reports show no such gate.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mpispeed.base.errors import AgreementError, CommError
from mpispeed.mesh.collectives.progress import LAST_GATES_SECONDS, Progress, is_broken
from mpispeed.mesh.collectives.work import SHOWN, Key, Work, by_text, described
from mpispeed.mesh.exits import open_lock
from mpispeed.mesh.mesh import Axes, Mesh

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS = 5.0
WARNING_SECONDS = 30.0

POLL_SECONDS = 0.1
ROUND_SECONDS = 1.0
"""Least time between two rounds."""

NAP_SECONDS = 0.02
"""Longest nap at the gate of a round: it may stand open for hours beside a computing rank."""

RANK_SECONDS = 0.25
"""By how much a rank warns later than the one before it on its node, so that the lowest one does."""


@dataclass(frozen=True, slots=True)
class Report:
    """The wait of one rank and the positions of its channels.

    `is_stuck` is False if the awaited operation is in no channel, or if a channel has work and is at no gate. `channel`
    is the name of the channel waited in and `gate` the gate it stands at.
    """

    rank: int
    text: str
    is_stuck: bool
    channel: str = ""
    gate: tuple[Key, int] | None = None
    gates: Sequence[tuple[Key, int]] = ()
    posted: Mapping[Key, int] = field(default_factory=dict)


def report_of(rank: int, work: Work, text: str, channels: Iterable[Progress]) -> Report:
    """The report of this rank while it waits for `work`. Not collective."""
    awaited, own, is_moving = "", None, False
    gates: list[tuple[Key, int]] = []
    posted: dict[Key, int] = {}
    for channel in channels:
        state, is_here = channel.state(work)
        posted.update(state.posted)
        is_moving |= state.is_moving
        if state.gate is not None:
            gates.append(state.gate)
        if is_here:
            awaited, own = channel.name, state.gate
    return Report(rank, text, own is not None and not is_moving, awaited, own, gates, posted)


def missing(gate: tuple[Key, int], reports: Iterable[Report]) -> list[int]:
    """Ranks that belong to the gate's group and have not posted it."""
    key, number = gate
    return [report.rank for report in reports if report.posted.get(key, number) < number]


def deadlock(reports: Sequence[Report]) -> str:
    """Description of the deadlock if nothing can ever move, else "". The same on all ranks, from equal reports."""
    if not all(report.is_stuck for report in reports):
        return ""
    if not all(missing(gate, reports) for report in reports for gate in report.gates):
        return ""
    texts = []
    for report in reports:
        text = f"{report.text} in channel {report.channel!r}"
        if report.gate is not None:
            absent = missing(report.gate, reports)
            names = ", ".join(map(str, absent[:SHOWN])) + (", ..." if len(absent) > SHOWN else "")
            text += f", which is at operation {report.gate[1]}, where rank{'s' if len(absent) > 1 else ''} {names} "
            text += f"{'have' if len(absent) > 1 else 'has'} not come"
        texts.append((report.rank, text))
    return by_text(texts, "waits for", "wait for")


class Watch:
    """Waits for started operations of a mesh, with detection of deadlocks.

    It sees waits that go through `wait`. Blocking verbs are not watched, and without threads (the MPI library lacks
    THREAD_MULTIPLE) started operations are blocking ones.
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: Axes | None = None,
        *,
        first_look_seconds: float = FIRST_LOOK_SECONDS,
        warning_seconds: float = WARNING_SECONDS,
    ) -> None:
        """Watch the ranks of the group over `axes`, all ranks by default.

        Args:
            mesh: its channels, and all others of its world, are reported.
            axes: names of the axes of the watched group.
            first_look_seconds: shorter waits cost nothing.
            warning_seconds: wait after which one rank per node logs a warning; other ranks may just be busy.

        Collective over: all ranks, with equal `axes`.
        """
        axes = mesh.topology.names if axes is None else axes
        self.first_look_seconds, self.warning_seconds = first_look_seconds, warning_seconds
        self._mesh, self._axes = mesh, axes
        self._comm = mesh.channel(f"watch.{axes if isinstance(axes, str) else '.'.join(axes)}")[axes]
        self._node_rank, self._lock = mesh.node.rank, open_lock(mesh.node)
        if self._lock is not None:
            weakref.finalize(self, os.close, self._lock)
        self._round: tuple[Work, list[Report]] | None = None
        self._next_round = 0.0
        progress = self._comm.progress if self._comm.size > 1 else None  # one rank waits for nobody
        self._progress = progress if progress is not None and progress.is_threaded else None
        if self._progress is not None:
            self._progress.is_watch = True
            self._progress.longest_nap_seconds = NAP_SECONDS
            self._comm.group.limits.timeout_seconds = None

    def wait(self, work: Work, describe: Callable[[], str]) -> None:
        """As `work.wait()`; `describe` gives the purpose, and is called only if it takes long.

        Raises:
            AgreementError: all ranks of the watched group wait, and for operations that can never begin; with the
                same text on all of them. Every channel in which one waits is broken then.
        """
        if self._progress is None or work.settle(self.first_look_seconds):
            work.wait()
            return
        begin = time.monotonic() - self.first_look_seconds
        warns_at = begin + self.warning_seconds + RANK_SECONDS * self._node_rank
        has_lock = False
        try:
            while not work.settle(POLL_SECONDS):
                self._look(work, describe)
                if time.monotonic() > warns_at:
                    has_lock, warns_at = self._warn(work, describe, begin), float("inf")
        finally:
            if has_lock and self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        work.wait()

    def close(self) -> None:
        """End the round that only some ranks have joined. Collective over: the watched group."""
        if self._progress is None:
            return
        state, _ = self._progress.state()
        posted = self._mesh[self._axes].gather_objects(dict(state.posted))
        self._progress.break_off(CommError("the watch is closed"), _furthest(posted))
        if self._round is not None:
            self._round[0].settle(LAST_GATES_SECONDS)
        self._round, self._progress = None, None

    def _channels(self) -> list[Progress]:
        return [channel for channel in self._mesh.world.channels if not channel.is_watch]

    def _look(self, work: Work, describe: Callable[[], str]) -> None:
        """Judge the last round if it is complete, and join the next one."""
        if self._round is not None:
            joined, reports = self._round
            if not joined.is_done():
                return
            self._round = None
            joined.wait()
            found = deadlock(reports)
            if found:
                self._break_channels(found, reports, work)
        if time.monotonic() < self._next_round:
            return
        self._next_round = time.monotonic() + ROUND_SECONDS
        own = report_of(self._mesh.rank, work, described(describe), self._channels())
        told: list[Report] = []
        self._round = self._comm.start(lambda comm: told.extend(comm.gather_objects(own)), "watch"), told

    def _break_channels(self, found: str, reports: Sequence[Report], work: Work) -> None:
        error = AgreementError(
            f"ranks wait for each other and none can go on: {found}. All ranks must start the same operations in the "
            "same order: look for control flow that depends on the rank or on its data"
        )
        error.is_collective = True
        furthest = _furthest([report.posted for report in reports])
        stuck = {key.channel for report in reports for key, _ in report.gates}
        for channel in self._channels():
            if channel.number in stuck:
                channel.break_off(
                    error, {key: number for key, number in furthest.items() if key.channel == channel.number}
                )
        # The channel ends its gates first: peers stand at them.
        work.settle(2 * LAST_GATES_SECONDS)
        raise error

    def _warn(self, work: Work, describe: Callable[[], str], begin: float) -> bool:
        """Warn of this wait unless another rank of the node has; True if this rank is the one that warned."""
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        elif self._node_rank > 0:
            return False
        own = report_of(self._mesh.rank, work, described(describe), self._channels())
        where = f" in channel {own.channel!r}" if own.channel else ""
        at = f", which is at operation {own.gate[1]}" if own.gate is not None else ""
        log.warning(
            "rank %d has been waiting %.0f s for %s%s%s; other ranks may be saving or computing, or be stuck",
            own.rank, time.monotonic() - begin, own.text, where, at,
        )  # fmt: skip
        return True


def end_unmatched(mesh: Mesh, channel: Mesh, axes: Axes) -> None:
    """Break a channel off in which ranks have started different operations, where another one is broken already.

    After ranks have diverged, some may have started what the others never will, and would wait for it.

    Collective over: the group over `axes` of `mesh`.
    """
    comm = channel[axes]
    if comm.size == 1 or comm.progress is None:
        return
    state, _ = comm.progress.state()
    has_broken = any(map(is_broken, mesh.world.channels))
    found = mesh[axes].gather_objects((has_broken, dict(state.posted)))
    posted = [counts for _, counts in found]
    if any(broken for broken, _ in found) and any(counts != posted[0] for counts in posted):
        comm.progress.break_off(CommError("ranks have diverged, and some never come to this"), _furthest(posted))


def _furthest(posted: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    """The largest count of every group."""
    furthest: dict[Key, int] = {}
    for counts in posted:
        for key, number in counts.items():
            furthest[key] = max(number, furthest.get(key, 0))
    return furthest
