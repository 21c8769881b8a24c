"""The watchdog of a node: a small process that outlives the ranks, compares their operations and explains their end.

    python -m mpispeed.watchdog.watchdog FOLDER

FOLDER has the recorders of the node's ranks and `settings.json`. The watchdog ends when all of its ranks have ended. It
uses neither torch nor MPI, so nothing that hangs or kills a rank does the same to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mpispeed.base.recorder_words import Order
from mpispeed.watchdog import report as reports
from mpispeed.watchdog.coordinator import Coordinator, Verdict
from mpispeed.watchdog.deaths import Deaths
from mpispeed.watchdog.node_ranks import NodeRanks, Settings
from mpispeed.watchdog.recorder_reader import find_recorders, remove_recorders
from mpispeed.watchdog.side_channel import SideChannel

TICK_SECONDS = 0.25
TALK_SECONDS = 1.0
"""Interval in which nodes send their states to the coordinating nodes."""

DEATH_SECONDS = 1.0
"""Wait after the first death for ranks that the launcher ends for it, and others that die of the same cause."""

FOLLOW_SECONDS = 2.0
OBEY_SECONDS = 5.0
"""A rank that does not follow the order to end is killed after this time."""

LEFT_OVER_SECONDS = 15.0
"""Ranks that still run this long after another's end was explained are ended."""

SUSPENDED_SECONDS = 5.0
"""After a longer pause of the watchdog all waits count anew, because the ranks have paused as well."""

TAIL = 8
"""Operations of each rank in a report."""


class Watchdog:
    """The loop: look at the ranks of this node, talk to the other nodes, judge, act."""

    def __init__(self, settings: Settings, recorders: Sequence[Path], listener: socket.socket | None) -> None:
        """Map the recorders. `listener` is a socket that other nodes can connect to, on the first nodes."""
        self.settings, self._listener = settings, listener
        self.node_ranks = NodeRanks(recorders, settings)
        self.head = Coordinator(settings, self.node_ranks)
        self.deaths = Deaths(settings)
        self.channel: SideChannel | None = None
        self._ordered_at = 0.0
        self._first_death_at = 0.0
        self._talked_at = 0.0
        self._ticked_at = time.monotonic()
        self._has_told_deaths = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Watch until all ranks of this node have ended and all reports are made."""
        loop = asyncio.get_running_loop()
        for tracker in self.node_ranks.trackers.values():
            handle = tracker.process.fileno()
            if handle is not None:
                loop.add_reader(handle, self._on_end, handle)
        if self._listener is not None:
            s = self.settings
            self.channel = SideChannel(s.node, list(s.nodes), s.secret, self._receive)
            await self.channel.start(self._listener)
            self.head.channel = self.channel
        while not self.tick():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS)
            self._wake.clear()
        if self.channel is not None:
            self._talk(is_last=True)
            await self.channel.finish()

    def _on_end(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        self._wake.set()

    def tick(self) -> bool:
        """One look; True when there is nothing left to watch."""
        now = time.monotonic()
        if now - self._ticked_at > SUSPENDED_SECONDS:
            self._begin_anew(now)
        self._ticked_at = now
        mismatch = self.node_ranks.look()
        died = [tracker for tracker in self.node_ranks.just_ended if tracker.has_died]
        if died and not self._ordered_at:
            self.deaths.add(died, self.node_ranks.memory)
            self._first_death_at = self._first_death_at or now
        if not self._ordered_at:
            if mismatch is not None:
                self._act(
                    Verdict(reports.of_mismatch(mismatch.text(), [v.rank for v in mismatch.votes], mismatch.group))
                )
            elif not self._first_death_at:
                for verdict in self.head.judge(now):
                    self._act(verdict)
        for tracker in self.node_ranks.trackers.values():
            tracker.answer()
        self._see_to_deaths(now)
        if self.channel is not None and (now - self._talked_at > TALK_SECONDS or self.node_ranks.just_ended):
            self._talk()
        self._see_to_order(now)
        is_waiting = self.deaths.known and not self._has_told_deaths
        return self.node_ranks.have_all_ended and not is_waiting

    def _begin_anew(self, now: float) -> None:
        """Restart all waits: the node was suspended, or had no time for this process."""
        self.node_ranks.begin_anew()
        self._first_death_at = now if self._first_death_at else 0.0
        for peer in self.channel.peers.values() if self.channel is not None else ():
            peer.heard_at = now

    # -- acts ------------------------------------------------------------------------------------------------------

    def _act(self, verdict: Verdict) -> None:
        """Make the report, and end the job if the verdict demands it."""
        report = verdict.report
        if self.head.is_speaker or verdict.is_own:
            reports.say(report.text)
        if not verdict.ends:
            return
        self._has_told_deaths = True  # deaths in the same moment are consequences
        reports.leave_mark()
        path = self._write(report)
        if path is not None and (self.head.is_speaker or verdict.is_own):
            reports.say(f"  report: {path}")
        if self.channel is not None:
            self.channel.send_all({"order": report.to_json()})
        self._end_ranks()

    def _end_ranks(self) -> None:
        self._ordered_at = time.monotonic()
        self._see_to_order(self._ordered_at)

    def _see_to_order(self, now: float) -> None:
        """Enforce an order to end: one rank aborts, as MPI writes lines for each; the others follow or are killed."""
        waited = now - self._ordered_at
        alive = [tracker for tracker in self.node_ranks.trackers.values() if not tracker.has_ended]
        if not self._ordered_at:
            return
        for tracker in alive if waited > FOLLOW_SECONDS else alive[:1]:
            tracker.view.order(Order.END, self.settings.end_code)
        for tracker in alive if waited > OBEY_SECONDS else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(tracker.view.pid, signal.SIGKILL)

    def _see_to_deaths(self, now: float) -> None:
        """Explain the deaths once all that belong to them are known, and end the ranks that are left."""
        if not self.deaths.known:
            return
        if self._has_told_deaths:
            if (
                now - self._first_death_at > LEFT_OVER_SECONDS
                and not self._ordered_at
                and not self.node_ranks.have_all_ended
            ):
                self._end_ranks()  # they should have ended by themselves
            return
        began = self._first_death_at or now
        self._first_death_at = began
        if now - began < DEATH_SECONDS and not (self.node_ranks.have_all_ended and self.channel is None):
            return
        self._has_told_deaths = True
        report, is_silent = self.deaths.report()
        is_to_say = is_silent and not reports.is_interrupted()
        # A rank that has shown its error, or left with a code of its own, needs no report in a new folder.
        path = self._write(report) if is_to_say or self.settings.is_run_folder else None
        if is_to_say and self.head.is_speaker:
            reports.say(report.text + (f"\n  report: {path}" if path else ""))
            reports.leave_mark()
        if not self._ordered_at and not self.node_ranks.have_all_ended and not self.deaths.end_the_job:
            if self.channel is not None:
                self.channel.send_all({"order": report.to_json()})
            self._end_ranks()

    def _write(self, report: reports.Report) -> Path | None:
        """Write the report of this node; the speaker's is that of the job."""
        now, folder = time.monotonic(), Path(self.settings.report_folder)
        tails = {
            rank: reports.tail(tracker.view.last(TAIL), tracker.view.groups, now)
            for rank, tracker in self.node_ranks.trackers.items()
        }
        views = {rank: tracker.view for rank, tracker in self.node_ranks.trackers.items()}
        steps = {rank: int(view.field("step")) for rank, view in views.items() if view.field("step_at") > 0}
        path = None
        if len(self.settings.nodes) > 1:
            path = reports.write(folder, f"report-node{self.settings.node}", report, tails, steps)
        if self.head.is_speaker:
            path = reports.write(folder, "report", report, tails, steps) or path
        return path

    # -- other nodes -------------------------------------------------------------------------------------------------

    def _talk(self, *, is_last: bool = False) -> None:
        if self.channel is None:
            return
        self._talked_at = time.monotonic()
        message: dict[str, Any] = {
            "states": [state.to_json() for state in self.node_ranks.states(asks=self.head.is_attentive).values()]
            if self.head.is_attentive or self.node_ranks.oldest_seconds > self.settings.look_seconds
            else [],
            "groups": self.node_ranks.take_groups(),
            "votes": self.node_ranks.take_votes(),
            "deaths": self.deaths.take_new(),
            "attention": self.node_ranks.oldest_seconds > self.settings.look_seconds,
            "ended": is_last or self.node_ranks.have_all_ended,
        }
        self.channel.send_all(message)

    def _receive(self, node: int, message: dict[str, Any]) -> None:
        if "order" in message:
            facts = dict(message["order"])
            if not self._ordered_at and not self.node_ranks.have_all_ended:
                self._write(reports.Report(str(facts.pop("kind")), str(facts.pop("text")), facts))
                self._end_ranks()
            return
        self.deaths.add_remote(message.get("deaths", ()))
        mismatch = self.head.take(node, message)
        if mismatch is not None and not self._ordered_at:
            self._act(Verdict(reports.of_mismatch(mismatch.text(), [v.rank for v in mismatch.votes], mismatch.group)))
        if message.get("deaths"):
            self._wake.set()


def start_watching(folder: Path, number: int | None) -> None:
    """Watch the ranks whose recorders are in `folder`; `number` is the descriptor of a listening socket."""
    settings = Settings.read(folder / "settings.json")
    listener = socket.socket(fileno=number) if number is not None else None
    if listener is not None:
        listener.setblocking(False)
    try:
        watchdog = Watchdog(settings, find_recorders(folder), listener)
    finally:
        with contextlib.suppress(OSError):
            remove_recorders(folder)  # all who need them have them mapped, and nobody may come to remove them later
    try:
        asyncio.run(watchdog.run())
    except Exception as error:
        reports.say(f"mpispeed: the watchdog failed and is gone, hangs are not named any more: {error!r}")
        if os.environ.get("MPISPEED_DEBUG"):
            raise


def main(words: Iterable[str]) -> None:
    """Entry point; ignores the signals that end the ranks, so that it can explain their end."""
    folder, *rest = words
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard) if hard != resource.RLIM_INFINITY else (soft, hard))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    start_watching(Path(folder), int(rest[0]) if rest else None)


if __name__ == "__main__":
    main(sys.argv[1:])
