"""Supervisor of a job: restarts it when it dies, on the hosts that still answer, within limits.

Nothing is repaired in place. A dead rank ends the job, and the script goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.launch.command import Launch, run_launch
from mpispeed.launch.hosts import Host, count_ranks, describe, fill, is_here
from mpispeed.launch.run_markers import Marks

DONE, REFUSED = 0, 2
"""Exit codes of jobs that ended on purpose; REFUSED: the user's request was refused."""

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_AT_A_TIME = 64
_GRACE_SECONDS = 20.0

Plan = Callable[[tuple[Host, ...], int], Launch]
"""Plans a start on these hosts; the number counts restarts before it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on restarts, hosts and waiting times.

    Each pause before a restart is twice the last. Hosts are probed every `beat_seconds` while the job runs; one
    that does not answer, nor `recheck_seconds` later, within `probe_seconds` each, is lost. If none answers, the
    network to them may be broken: then they are lost after `wait_seconds`.
    """

    least_nodes: int = 1
    most_nodes: int | None = None
    most_restarts: int = 3
    pause_seconds: float = 5.0
    longest_pause_seconds: float = 300.0
    wait_seconds: float = 600.0
    probe_seconds: float = 15.0
    beat_seconds: float = 60.0
    recheck_seconds: float = 5.0

    def check(self) -> None:
        """Refuse limits that cannot hold.

        Raises:
            ConfigError: naming the option.
        """
        if self.least_nodes < 1 or self.most_restarts < 0 or self.pause_seconds < 0:
            msg = (
                f"--min-nodes is {self.least_nodes}, --max-restarts {self.most_restarts}, --restart-pause "
                f"{self.pause_seconds:g}; they have to be at least 1, 0 and 0"
            )
            raise ConfigError(msg)
        if self.most_nodes is not None and self.most_nodes < self.least_nodes:
            msg = f"--max-nodes is {self.most_nodes}, below --min-nodes {self.least_nodes}; swap or drop one"
            raise ConfigError(msg)


class Asks(Protocol):
    """Interface for the state of hosts."""

    def silence(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Return lost hosts with the reason; hosts of unknown state count as present."""


@dataclass
class Prober:
    """Probes hosts by a command that has to succeed; the host's name follows `words`."""

    words: tuple[str, ...] = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
    question: tuple[str, ...] = ("true",)
    limit_seconds: float = 15.0
    asks_this_host: bool = False

    def silence(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Return hosts that do not answer, with the reason."""
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            reasons = pool.map(self._ask, hosts)
            return {host.name: reason for host, reason in zip(hosts, reasons, strict=True) if reason}

    def _ask(self, host: Host) -> str:
        """Return the reason why a host does not answer; empty if it does."""
        if is_here(host.name) and not self.asks_this_host:
            return ""
        argv = [*self.words, host.name, *self.question]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=self.limit_seconds, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {self.limit_seconds:g} s"
        except OSError as error:
            return str(error)
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return last if done.returncode else ""


@dataclass
class Supervisor:
    """Runs a job again until it ends on purpose or a limit is reached.

    `counts` are the numbers of ranks that the job can have, None if it can have any. `say` gets the messages.
    `prober` is asked before a restart, `watcher` (None for the same) while the job runs. `marks` returns the
    last start's note of its end on purpose, "" for none.
    """

    hosts: Sequence[Host]
    plan: Plan
    prober: Asks
    limits: Limits
    say: Callable[[str], None]
    counts: Sequence[int] | None = None
    sleep: Callable[[float], None] = time.sleep
    watcher: Asks | None = None
    marks: Marks | None = None
    _told: list[int] = field(default_factory=list)
    _is_cut: bool = False  # ended because the watcher found a host lost

    def run(self) -> int:
        """Run the job until its end; return the exit code of the last start.

        Raises:
            UsageError: too few hosts answer, or no number of ranks fits them.
        """
        self.limits.check()
        restarts = 0
        while True:
            hosts = self.choose(self._wait_for_hosts(self.prober if restarts else self._watcher))
            if restarts:
                self.say(f"restart {restarts} of {self.limits.most_restarts} on {describe(hosts)}")
            began = time.monotonic()
            code = self._run_once(self.plan(hosts, restarts), hosts)
            ran = f"the job ended with exit code {code} after {time.monotonic() - began:.0f} s"
            if self._told or self._has_ended_on_purpose(code, hosts):
                return code
            if restarts >= self.limits.most_restarts:
                self.say(f"{ran}, and was restarted {restarts} times; --max-restarts allows no more")
                return code
            pause = min(self.limits.pause_seconds * 2**restarts, self.limits.longest_pause_seconds)
            restarts += 1
            self.say(f"{ran}; it is started again in {pause:g} s")
            self.sleep(pause)

    def answering(self) -> tuple[Host, ...]:
        """Return the hosts that answer before the first start, when they are enough.

        Raises:
            UsageError: they did not become enough in time.
        """
        return tuple(self._wait_for_hosts(self._watcher))

    def choose(self, alive: Sequence[Host]) -> tuple[Host, ...]:
        """Choose hosts and slots among the hosts that answer.

        Raises:
            UsageError: the job can have none of the numbers of ranks that fit.
        """
        hosts = tuple(alive)[: self.limits.most_nodes]
        if self.counts is None:
            return hosts
        there = count_ranks(hosts)
        fitting = max((count for count in self.counts if count <= there), default=0)
        if not fitting:
            msg = (
                f"{describe(hosts)} have {there} slots, but the elasticity section of the config allows "
                f"{', '.join(map(str, sorted(self.counts)))} ranks; add hosts, or change its batch sizes"
            )
            raise UsageError(msg)
        return fill(hosts, fitting, "the host file")

    @property
    def _watcher(self) -> Asks:
        return self.watcher or self.prober

    def _has_ended_on_purpose(self, code: int, hosts: Sequence[Host]) -> bool:
        """True if there is nothing to restart.

        The note of a job that was cut off does not count: it was told to save and leave, to go on elsewhere.
        """
        if code == REFUSED:
            return True
        if self._is_cut:
            return False
        noted = self.marks.new() if self.marks else ""
        if noted and code != DONE:
            self.say(f"the job has ended with exit code {code} and has marked itself as {noted}; it is not restarted")
        return bool(noted) or (code == DONE and not self._has_lost(hosts))

    def _has_lost(self, hosts: Sequence[Host]) -> bool:
        """True if a host of a job that seems to have succeeded is silent: Open MPI 5 returns 0 when it loses a host.

        If the job was done, the next start finds nothing to do. If none of several hosts answers, the network to
        them is broken.
        """
        silent = self._watcher.silence(hosts)
        if len(silent) == len(hosts) > 1:
            self.say("no host answers, but the job has told that it ended well")
            return False
        if silent:
            self.say(f"the job seems to have ended well, but {', '.join(sorted(silent))} is lost")
        return bool(silent)

    def _wait_for_hosts(self, prober: Asks) -> list[Host]:
        """Return the hosts that answer, when they are enough.

        Raises:
            UsageError: they did not become enough in time.
        """
        began, pause = time.monotonic(), self.limits.pause_seconds
        reported: set[str] = set()
        while True:
            silent = prober.silence(self.hosts)
            for name in sorted(silent.keys() - reported):
                self.say(f"host {name} does not answer ({silent[name]})")
            reported |= silent.keys()
            alive = [host for host in self.hosts if host.name not in silent]
            if len(alive) >= self.limits.least_nodes:
                return alive
            if time.monotonic() - began > self.limits.wait_seconds:
                msg = (
                    f"{len(alive)} of {len(self.hosts)} hosts answer, --min-nodes is {self.limits.least_nodes}; "
                    f"silent: {', '.join(f'{name} ({reason})' for name, reason in sorted(silent.items()))}"
                )
                raise UsageError(msg)
            self.say(f"{len(alive)} hosts answer, {self.limits.least_nodes} are needed; asking again")
            self.sleep(max(1.0, pause))
            pause = min(2 * pause, self.limits.longest_pause_seconds)

    def _run_once(self, launch: Launch, hosts: Sequence[Host]) -> int:
        ended = threading.Event()
        self._is_cut = False
        if self.marks:
            self.marks.remember()

        def note(number: int) -> None:
            if number in _ENDINGS:
                self._told.append(number)

        watchers: list[threading.Thread] = []

        def begin(process: subprocess.Popen[bytes]) -> None:
            watcher = threading.Thread(target=self._watch, args=(process, hosts, ended), daemon=True)
            watchers.append(watcher)
            watcher.start()

        try:
            return run_launch(launch, on_start=begin, on_signal=note)
        finally:
            ended.set()
            for watcher in watchers:
                watcher.join(self.limits.probe_seconds + _GRACE_SECONDS)

    def _watch(self, process: subprocess.Popen[bytes], hosts: Sequence[Host], ended: threading.Event) -> None:
        """End the job when a host is lost, because MPI may wait for it for ever."""
        for silent in self._beats(hosts, ended):
            lost = ", ".join(f"{name} ({reason})" for name, reason in sorted(silent.items()))
            self.say(f"lost: {lost}; ending the job")
            self._is_cut = True
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
                return
            process.kill()
            return

    def _beats(self, hosts: Sequence[Host], ended: threading.Event) -> Iterator[dict[str, str]]:
        """Return hosts that did not answer twice in a row; all at once only if that stays so."""
        none_since: float | None = None
        while not ended.wait(self.limits.beat_seconds):
            first = self._watcher.silence(hosts)
            if not first or ended.wait(min(self.limits.recheck_seconds, self.limits.beat_seconds)):
                none_since = None
                continue
            again = self._watcher.silence([host for host in hosts if host.name in first])
            if len(again) < len(hosts):
                none_since = None
            elif none_since is None:
                none_since = time.monotonic()
                self.say("no host of the job answers, so it may be the way to them; the job is left alone for now")
            is_unclear = none_since is not None and time.monotonic() - none_since < self.limits.wait_seconds
            if again and not is_unclear and not ended.is_set():
                yield again
