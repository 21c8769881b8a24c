"""The first cause of a job's end among the deaths of its ranks, in words, with a remedy.

Free of torch and MPI: processes that outlive the ranks use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mpispeed.base.units import format_bytes, format_ranks
from mpispeed.watchdog.exit_codes import MEMORY_CURE, TELLING, Cause, Strength, of_code, of_signal, of_words
from mpispeed.watchdog.memory import Groups, MemoryFacts, memory_facts
from mpispeed.watchdog.process import ProcessWatch, Status, signal_name, start_ticks, wait_exit

__all__ = [
    "Cause", "Death", "Explanation", "Groups", "MemoryFacts", "ProcessWatch", "Status", "Strength", "cause_of",
    "describe_exit_code", "explain", "memory_facts", "start_ticks", "wait_exit",
]  # fmt: skip

SAME_MOMENT_SECONDS = 0.5
"""Deaths seen within this time count as simultaneous, because processes are looked at in intervals."""

NEAR_LIMIT = 0.95
"""A group's peak above this share of its limit makes the limit a likely reason where kills cannot be counted."""

_KILL = 9
_BY_KERNEL = ("memory_limit", "node_memory")
_SHOWN_LINES = 5

_LOUD = (4, 6, 7, 8, 9, 11, 15, 24, 25)
"""Signals that end a process, without those whose numbers are common exit codes."""


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one rank's process, from facts noted while it lived and after it.

    `last_words` is the text of a Python error, `last_lines` the recorder's last lines, `memory_before` a look at any
    time before and `memory_after` one after the end, `had_left` is True if the rank had announced a regular end,
    `seen_seconds` is the time at which the end was noticed, on one clock for all deaths.
    """

    rank: int
    host: str = ""
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None
    last_words: str | None = None
    last_lines: Sequence[str] = ()
    peak_bytes: int | None = None
    memory_before: MemoryFacts | None = None
    memory_after: MemoryFacts | None = None
    had_left: bool = False
    seen_seconds: float | None = None

    @property
    def name(self) -> str:
        """Rank, host and process, as far as they are known."""
        where = [f"on {self.host}"] if self.host else []
        return " ".join([f"rank {self.rank}", *where, *([f"(pid {self.pid})"] if self.pid else [])])


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason for a job's end: `rank` was first (None if a node was, or nothing is known), `text` says all of it."""

    kind: str
    reason: str
    rank: int | None
    cure: str
    text: str
    consequences: tuple[int, ...] = ()


def cause_of(death: Death) -> Cause | None:
    """Return the reason for one rank's end, seen alone; None if it left in good order."""
    if death.had_left and death.exit_code in (0, None) and death.signal is None:
        return None
    if death.last_words and death.last_words.strip():
        return of_words(death.last_words)
    number = death.signal
    if number is None and death.exit_code is not None and death.exit_code == 128 + _KILL:
        number = _KILL
    if number == _KILL:
        return _out_of_memory(death) or of_signal(_KILL)
    if number is not None:
        return of_signal(number)
    if death.exit_code is None:
        cure = "look at the rank's log and at the kernel's (dmesg) of its node"
        return Cause("unknown", Strength.UNKNOWN, "ended without a word; how is not known", cure)
    if death.exit_code == 0:
        cure = "leave the training loop on all ranks together; sys.exit or return on one rank ends the job"
        return Cause("left", Strength.OWN_CODE, "left early with exit code 0 while others went on", cure)
    return of_code(death.exit_code)


def explain(deaths: Iterable[Death], lost_nodes: Sequence[str] = ()) -> Explanation:
    """Find the first cause among deaths of ranks and nodes that do not answer.

    A rank that brought its end upon itself comes before one that somebody killed, because launchers kill all ranks
    when one has died; of several the earliest counts.
    """
    causes = _share_kills([(death, cause) for death in deaths if (cause := cause_of(death)) is not None])
    if not causes and not lost_nodes:
        text = "mpispeed: all ranks left in good order"
        return Explanation("finished", "all ranks left in good order", None, "", text)
    if not causes:
        return _explain_nodes(lost_nodes, causes)
    death, cause = _first(causes)
    if lost_nodes and (cause.strength < Strength.OWN_CODE or death.host in lost_nodes):
        return _explain_nodes(lost_nodes, causes)
    others = tuple(sorted({other.rank for other, _ in causes} - {death.rank}))
    return Explanation(
        cause.kind, f"{death.name} {cause.reason}", death.rank, cause.cure, _text(death, cause, causes), others
    )


def describe_exit_code(code: int, *, is_hydra: bool = False) -> str:
    """A job's exit code as one sentence; nothing for 0.

    Args:
        code: of the launcher, or -number as Python's subprocess tells a signal.
        is_hydra: the launcher is mpirun of MPICH or Intel MPI, which tells a signal by its bare number.
    """
    if code == 0:
        return ""
    number = -code if code < 0 else code - 128 if code - 128 in TELLING else code if is_hydra and code in _LOUD else 0
    if not number:
        cause = of_code(code)
        return f"the job {cause.reason}; {cause.cure}"
    how = f"exit code {code} is signal {number}, {signal_name(number)}"
    if number == _KILL:
        return (
            f"the job was killed ({how}): by the kernel for want of memory (dmesg | grep -i oom; sacct -j JOB -o "
            "State,MaxRSS), or from outside by kill -9, scancel or the batch system"
        )
    cause = of_signal(number)
    return f"the job {cause.reason} ({how}); {cause.cure}"


# -- parts -------------------------------------------------------------------------------------------------------


def _out_of_memory(death: Death) -> Cause | None:
    """SIGKILL by the kernel for want of memory, as far as counts show it."""
    before, after = death.memory_before, death.memory_after
    if after is None:
        return None
    strength, names_group = Strength.OWN_FAULT, after.killed_in_group
    if names_group is None and before is not None and _grown_kills(before, after, is_node=False) > 0:
        is_at_limit = _was_at_limit(before, after)
    else:
        is_at_limit = bool(names_group)
    if is_at_limit:
        group = f" of {after.group}" if after.group else ""
        limit = f"the limit of {format_bytes(after.limit_bytes)}{group}" if after.limit_bytes else "its memory limit"
        return Cause("memory_limit", strength, f"was killed by the kernel at {limit}{_peak(death)}", MEMORY_CURE)
    if names_group is not None or _grown_kills(before, after, is_node=True) > 0:
        total = f" of {format_bytes(after.total_bytes)}" if after.total_bytes else ""
        return Cause("node_memory", strength, f"was killed by the kernel because the memory{total} of its node ran "
                     f"out{_peak(death)}", MEMORY_CURE)  # fmt: skip
    peak = after.group_peak_bytes
    if after.kills is None and after.limit_bytes and peak and peak > NEAR_LIMIT * after.limit_bytes:
        return Cause("memory_limit", strength, "was killed, probably by the kernel at the limit of "
                     f"{format_bytes(after.limit_bytes)}{_peak(death)}", MEMORY_CURE)  # fmt: skip
    return None


def _was_at_limit(before: MemoryFacts, after: MemoryFacts) -> bool:
    """False if the group of a rank had memory left, so that a kill in it was for want of the node's."""
    is_counted = before.limit_hits is not None and after.limit_hits is not None
    if not after.limit_bytes or (is_counted and _grown(before.limit_hits, after.limit_hits) <= 0):
        return False
    return after.group_peak_bytes is None or after.group_peak_bytes >= NEAR_LIMIT * after.limit_bytes


def _share_kills(causes: list[tuple[Death, Cause]]) -> list[tuple[Death, Cause]]:
    """Leave as many deaths to the kernel as it counted, those first that it names: the launcher kills the rest."""
    start = _start(causes)
    left: dict[tuple[str, str, str], int] = {}
    found: dict[int, Cause] = {}

    def order(pair: tuple[Death, Cause]) -> tuple[bool, float, int]:
        return not _is_named(pair[0]), _moment(pair[0], start), -(_peak_bytes(pair[0]) or 0)

    for death, cause in sorted(causes, key=order):
        found[id(death)] = cause
        after, before = death.memory_after, death.memory_before
        if cause.kind in _BY_KERNEL and after is not None and after.kills is not None:
            is_node = cause.kind == "node_memory"
            grown = _grown_kills(before, after, is_node=is_node)
            key = (death.host, cause.kind, "" if is_node else after.group)
            left[key] = left.get(key, grown) - 1
            if left[key] < 0 and not _is_named(death):
                found[id(death)] = of_signal(_KILL)
    return [(death, found[id(death)]) for death, _ in causes]


def _is_named(death: Death) -> bool:
    """True if the kernel's log says that it has ended this very process for want of memory."""
    return death.memory_after is not None and death.memory_after.killed_in_group is not None


def _grown_kills(before: MemoryFacts | None, after: MemoryFacts, *, is_node: bool) -> int:
    if before is None:
        return 0
    in_group = _grown(before.kills, after.kills)
    # Version 2 counts a kill in its group also where it was the node that had no memory left.
    return max(in_group, _grown(before.node_kills, after.node_kills)) if is_node else in_group


def _grown(before: int | None, after: int | None) -> int:
    """Number of kills between two looks; 0 if one of them could not count."""
    return 0 if before is None or after is None else after - before


def _peak(death: Death) -> str:
    facts = []
    peak = _peak_bytes(death)
    if peak is not None:
        facts.append(f"the rank had {format_bytes(peak)} or more")
    if death.memory_after is not None and death.memory_after.group_peak_bytes:
        facts.append(f"peak of the group {format_bytes(death.memory_after.group_peak_bytes)}")
    return f" ({', '.join(facts)})" if facts else ""


def _peak_bytes(death: Death) -> int | None:
    """The largest peak that was seen; what came after the last look is in no record of a dead process."""
    looks = [facts for facts in (death.memory_before, death.memory_after) if facts]
    seen = [death.peak_bytes, *(size for facts in looks for size in (facts.peak_bytes, facts.killed_bytes))]
    return max((size for size in seen if size is not None), default=None)


def _start(causes: Sequence[tuple[Death, Cause]]) -> float:
    return min((death.seen_seconds for death, _ in causes if death.seen_seconds is not None), default=0.0)


def _moment(death: Death, start: float) -> float:
    """Number of the moment at which a death was seen; the first one if the time is not known."""
    return 0.0 if death.seen_seconds is None else (death.seen_seconds - start) // SAME_MOMENT_SECONDS


def _first(causes: Sequence[tuple[Death, Cause]]) -> tuple[Death, Cause]:
    """The earliest of the strongest; moments that are close are one, and then the strongest counts."""
    pool = [found for found in causes if found[1].strength >= Strength.OWN_CODE] or list(causes)
    start = _start(pool)

    def order(found: tuple[Death, Cause]) -> tuple[float, int, float, int]:
        death, cause = found
        seen = start if death.seen_seconds is None else death.seen_seconds
        return _moment(death, start), -cause.strength, seen, death.rank

    return min(pool, key=order)


def _explain_nodes(lost: Sequence[str], causes: Sequence[tuple[Death, Cause]]) -> Explanation:
    names = ", ".join(lost)
    reason = f"node{'s' if len(lost) > 1 else ''} {names} no longer answer{'' if len(lost) > 1 else 's'}"
    cure = (
        "see whether the node is up (sinfo -n NODE, ping) and the network between the nodes is whole; start again "
        "without it (--exclude), from the last checkpoint"
    )
    ranks = tuple(sorted({death.rank for death, _ in causes}))
    lines = [f"mpispeed: the job ended because {reason}", *_consequences(ranks), f"  what helps: {cure}"]
    return Explanation("lost_node", reason, None, cure, "\n".join(lines), ranks)


def _text(death: Death, cause: Cause, causes: Sequence[tuple[Death, Cause]]) -> str:
    is_own = cause.strength > Strength.ENDED_BY_OTHERS
    alike = sorted({other.rank for other, found in causes if found == cause and is_own} - {death.rank})
    rest = sorted({other.rank for other, _ in causes} - {death.rank, *alike})
    lines = [f"mpispeed: the job ended because {death.name} {cause.reason}"]
    if alike:
        lines.append(f"  {format_ranks(alike)} ended in the same way")
    lines += _consequences(rest)
    peak = _peak_bytes(death)
    if peak is not None and cause.kind not in _BY_KERNEL:
        lines.append(f"  memory of rank {death.rank}: a peak of {format_bytes(peak)} or more")
    if death.last_lines:
        lines.append(f"  last operations of rank {death.rank}:")
        lines += [f"    {line}" for line in death.last_lines[-_SHOWN_LINES:]]
    lines.append(f"  what helps: {cause.cure}")
    return "\n".join(lines)


def _consequences(ranks: Sequence[int]) -> list[str]:
    return [f"  {format_ranks(ranks)} ended as a consequence"] if ranks else []
