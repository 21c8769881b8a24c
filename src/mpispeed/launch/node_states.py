"""Lost hosts of a SLURM job by the controller's answer: one question for all of them, not a step on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpispeed.base.commands import run_command
from mpispeed.launch.hosts import Host

ASK_SECONDS, RECHECK_SECONDS = 300.0, 60.0
"""Intervals of questions: the controller serves many jobs, and itself notices lost nodes at about this pace."""

_LOST = ("down", "fail")


@dataclass
class NodeStates:
    """Asks `sinfo` for the states of nodes. Without an answer nothing is known, and no host is lost."""

    say: Callable[[str], None]
    limit_seconds: float = 15.0
    _is_silent: bool = field(default=False, init=False)

    def silence(self, hosts: Sequence[Host]) -> dict[str, str]:
        """Hosts that SLURM calls lost, with the reason."""
        try:
            text = self._ask(",".join(host.name for host in hosts))
        except OSError as error:
            if not self._is_silent:
                self.say(f"SLURM does not say how the hosts are ({error}); none is taken to be lost")
            self._is_silent = True
            return {}
        self._is_silent = False
        known = lost_nodes(text)
        return {host.name: known[host.name] for host in hosts if host.name in known}

    def _ask(self, names: str) -> str:
        """The answer for these nodes, a line for each and each of its partitions.

        Raises:
            OSError: there is no sinfo, no controller, or no answer in time.
        """
        words = ["sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N %T"]
        done = run_command(words, seconds=self.limit_seconds)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or [f"sinfo ended with {done.returncode}"])[-1])
        return done.stdout


def lost_nodes(text: str) -> dict[str, str]:
    """Node -> reason, of lines "node state".

    A star means that the node does not respond. One that is drained, or expected to fail, lets its jobs go on.
    """
    states = [line.split() for line in text.splitlines()]
    return {
        words[0]: f"SLURM says {words[1]}"
        for words in states
        if len(words) == 2 and (words[1].endswith("*") or words[1].rstrip("*~#!%$@^-+") in _LOST)
    }
