"""Catalog of fault drills: faults, expected outcomes, and the checks of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

FAILS, FINISHES = "fails", "finishes"


class Files(Enum):
    """Expected state of checkpoints after a drill."""

    SAME = "the run goes on from them and ends as one without a fault"
    FINITE = "they are whole"
    DAMAGED = "the damage is found, and nothing is loaded from it"


@dataclass(frozen=True, slots=True)
class Drill:
    """One fault and its expected outcome.

    `inject` is a fault with {rank}, {step}, {last} and {late} to be filled in: the faulty rank, a step behind the first
    checkpoint, the number of the last save, and the seconds after which a late rank is reported.
    """

    name: str
    inject: str
    what: str
    end: str = FAILS
    says: str = ""
    files: Files = Files.SAME
    needs_peers: bool = False


_WAITS = r"wait|diverged"

DRILLS: tuple[Drill, ...] = (
    Drill("kill", "kill:rank={rank}@step={step}", "a rank is killed", says=r"killed|SIGKILL"),
    Drill("exit", "exit:rank={rank},code=3@step={step}", "a rank leaves", says=r"exit code 3"),
    Drill("error", "error:rank={rank}@step={step}", "a Python error on one rank", says=r"InjectedError"),
    Drill("stall", "stall:rank={rank}@step={step}", "a rank sleeps for ever", says=_WAITS, needs_peers=True),
    Drill(
        "late", "stall:rank={rank},seconds={late}@step={step}", "a rank comes late", FINISHES, r"notice: waiting for",
        needs_peers=True,
    ),
    Drill("slow", "slow:rank={rank},seconds=0.2,steps=3@step={step}", "a rank is slow for three steps", FINISHES),
    Drill(
        "nan", "nan:rank={rank}@step={step}", "a gradient that is not a number", FINISHES, r"skipped", Files.FINITE
    ),
    Drill("memory", "memory:rank={rank},bytes=256MiB@step={step}", "memory runs out", says=r"MemoryError"),
    Drill("full_disk", "full_disk:rank={rank}@save={last}", "the disk is full", says=r"too large|No space|Errno 2[78]"),
    Drill(
        "corrupt", "corrupt:rank=0@save={last}", "a checkpoint is damaged", FINISHES, files=Files.DAMAGED
    ),
    Drill("missing", "missing:rank={rank}@step={step}", "a collective is left out", says=_WAITS, needs_peers=True),
    Drill("order", "order:rank={rank}@step={step}", "collectives in another order", says=_WAITS, needs_peers=True),
    Drill("size", "size:rank={rank}@step={step}", "a collective of another size", says=_WAITS, needs_peers=True),
    Drill(
        "dtype", "dtype:rank={rank}@step={step};slow:rank=all,seconds=2@step={step}",
        "a collective of another dtype", says=_WAITS, needs_peers=True,
    ),
    Drill("send", "send:rank={rank}@step={step}", "a message that nobody receives", says=_WAITS, needs_peers=True),
)  # fmt: skip


def choose(names: str, size: int) -> tuple[list[Drill], list[str]]:
    """The drills of these names, or all; the second list has those that need more ranks.

    Raises:
        KeyError: the first name that there is not.
    """
    known = {drill.name: drill for drill in DRILLS}
    wanted = list(known) if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    chosen = [known[name] for name in wanted]
    return (
        [drill for drill in chosen if size > 1 or not drill.needs_peers],
        [drill.name for drill in chosen if size < 2 and drill.needs_peers],
    )


def names_known() -> tuple[str, ...]:
    """Names of all drills."""
    return tuple(drill.name for drill in DRILLS)


@dataclass(frozen=True, slots=True)
class Check:
    """One check and its result."""

    name: str
    is_passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of one run of the script. `code` is None if it was killed at the limit."""

    code: int | None
    output: str
    seconds: float


@dataclass(slots=True)
class Result:
    """Result of a drill."""

    name: str
    inject: str
    what: str
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """True if everything that was checked holds."""
        return all(check.is_passed for check in self.checks)

    def as_row(self) -> dict[str, Any]:
        """Return a row for the report."""
        checks = [{"name": each.name, "passed": each.is_passed, "detail": each.detail} for each in self.checks]
        return {
            "name": self.name, "fault": self.inject, "what": self.what, "passed": self.is_passed,
            "seconds": round(self.seconds, 3), "checks": checks, "notes": self.notes,
        }  # fmt: skip


def check_end(drill: Drill, outcome: Outcome, rank: int, limit_seconds: float) -> Iterator[Check]:
    """Check the end of the script and the messages on it."""
    if outcome.code is None:
        yield Check("ends", False, f"still ran after {limit_seconds:.0f} s and was ended from outside")
        return
    yield Check("ends", True, f"after {outcome.seconds:.1f} s")
    has_failed = outcome.code != 0
    yield Check("exit code", has_failed == (drill.end == FAILS), f"is {outcome.code}; the run {drill.end}")
    said = explanations(outcome.output)
    if drill.end == FAILS:
        heads = [text.splitlines()[0][:160] for text in said]
        yield Check("says it once", len(said) == 1, " | ".join(heads) or "no line of mpispeed says why the job ended")
        text = "\n".join(said)
        yield Check(f"names rank {rank}", names_rank(text, rank), heads[0] if heads else "")
    else:
        yield Check("ends quietly", not said, " | ".join(text.splitlines()[0][:160] for text in said))
        text = outcome.output
    if drill.says:
        found = re.search(drill.says, text)
        yield Check("names the cause", found is not None, found[0] if found else f"nothing like {drill.says!r}")


_LAST_WORD = re.compile(r"exit code -?\d+ is signal|^mpispeed: the job (?:left|ended) with exit code")


def explanations(output: str) -> list[str]:
    """Explanations by mpispeed of a job's end: each heading with the indented lines, or the traceback, below it.

    Notices do not end a job, and the last line of `mpispeed run` only says what the exit code means.
    """
    found: list[list[str]] = []
    is_open = False
    for line in output.splitlines():
        if line.startswith("mpispeed: "):
            is_open = not line.startswith("mpispeed: notice") and not _LAST_WORD.search(line)
            if is_open:
                found.append([line])
        elif is_open and (line.startswith((" ", "Traceback")) or _is_error(line)):
            found[-1].append(line)
        else:
            is_open = False
    return ["\n".join(lines) for lines in found]


def _is_error(line: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*(?:Error|Exception)(?::|$)", line) is not None


def names_rank(text: str, rank: int) -> bool:
    """True if a text speaks of a rank, alone or in a list such as "ranks 0, 2-4"."""
    for listed in re.findall(r"\branks? ((?:\d+(?:-\d+)?(?:, |\b))+)", text):
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", listed):
            if int(low) <= rank <= int(high or low):
                return True
    return False


def table(results: list[Result], left_out: Mapping[str, str]) -> list[str]:
    """The report for people: a line for each drill, and the failed checks below it."""
    width = max([len(result.name) for result in results] + [len(name) for name in left_out] + [5])
    lines = [f"{'drill':{width}}  result  seconds  fault"]
    for result in results:
        verdict = "pass" if result.is_passed else "FAIL"
        lines.append(f"{result.name:{width}}  {verdict:6}  {result.seconds:7.1f}  {result.what}: {result.inject}")
        lines += [f"{'':{width}}    {each.name}: {each.detail}" for each in result.checks if not each.is_passed]
        lines += [f"{'':{width}}    note: {note}" for note in result.notes]
    lines += [f"{name:{width}}  -       {'':7}  {reason}" for name, reason in left_out.items()]
    passed = sum(result.is_passed for result in results)
    lines.append(f"{passed} of {len(results)} drills passed")
    return lines
