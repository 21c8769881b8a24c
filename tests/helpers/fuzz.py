"""Altered files read by the real code, in a process of its own: right values or a refusal, soon and in little memory.

A module has a table `KINDS`; `run` has a child process go through cases of some of its kinds. Every case is made from
the name of the kind and the number of the case alone, so that one can be looked into by `case`.
"""

import contextlib
import importlib
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpispeed.base.errors import MpispeedError

CPU_SECONDS = 5
"""For one case: its own time, because the neighbours of a shared machine take what they want."""
SECONDS = 120
"""For one case that waits for something."""
MORE_BYTES = 500 << 20
MOST_SIGNS = 3000


@dataclass(frozen=True)
class Kind:
    """A kind of files.

    Attributes:
        name: of the kind.
        make: writes a valid one into a folder.
        alter: alters a copy of that folder; gives what it did in words.
        read: reads the copy by the real code; gives the values, or raises one of `errors`.
        wrong: (values of the valid one, folder, values): why these are not what the altered files hold; "" if they are.
        errors: what `read` may raise.
    """

    name: str
    make: Callable[[Path], object]
    alter: Callable[[random.Random, Path], str]
    read: Callable[[Path], Any]
    wrong: Callable[[Any, Path, Any], str]
    errors: tuple[type[Exception], ...] = (MpispeedError, OSError)


@dataclass
class Outcome:
    """What became of the cases of a kind: a line for each that was wrong, and how many were read and refused."""

    problems: list[str] = field(default_factory=list)
    read: int = 0
    refused: int = 0


def run(module: str, cases: dict[str, int], folder: Path) -> dict[str, Outcome]:
    """Go through the cases of kinds, from 0 to the given number; one process does all, unless a case ends it."""
    outcomes = {kind: Outcome() for kind in cases}
    left = [[kind, 0, last] for kind, last in cases.items()]
    while left:
        command = [sys.executable, "-m", "tests.helpers.fuzz", json.dumps([module, left, str(folder)])]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | threads, text=True, cwd=root) as child:
            begun = _listen(child, outcomes)
        if begun is None:
            return outcomes
        kind, number, what = begun
        assert kind in cases, f"{what}: {_ended(child.returncode)}"
        outcomes[kind].problems.append(f"{kind} {number} ({what}): {_ended(child.returncode)}")
        left = left[[row[0] for row in left].index(kind) :]
        left[0][1] = number + 1
    return outcomes


def _listen(child: subprocess.Popen, outcomes: dict[str, Outcome]) -> tuple[str, int, str] | None:
    """What the child says; gives the case that it was in when it ended or waited for ever."""
    begun: tuple[str, int, str] | None = ("", 0, "the valid files could not be read")
    while True:
        if not select.select([child.stdout], [], [], SECONDS)[0]:
            child.kill()
            return begun
        line = child.stdout.readline()
        if not line:
            return begun
        said = json.loads(line)
        if said is None:
            begun = None
        elif "begun" in said:
            begun = tuple(said["begun"])
        else:
            outcome = outcomes[begun[0]]
            outcome.refused += said["is_refused"]
            outcome.read += not said["is_refused"]
            if said["problem"]:
                outcome.problems.append(f"{begun[0]} {begun[1]} ({begun[2]}): {said['problem']}")


def _ended(code: int | None) -> str:
    if code == -signal.SIGPROF:
        return f"it took more than {CPU_SECONDS} s"
    if code == -signal.SIGKILL:
        return f"it waited for more than {SECONDS} s, or took all memory"
    return f"the process ended with {code}"


def case(kind: Kind, number: int, folder: Path) -> str:
    """Make an altered copy of the folder of the valid one; gives what was altered."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folder.with_name("valid"), folder)
    return kind.alter(random.Random(f"{kind.name} {number}"), folder)


def _child(module: str, left: list[tuple[str, int, int]], home: Path) -> None:
    """Go through cases, with lines before and after each on what was stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(what: object) -> None:
        out.write(f"{json.dumps(what)}\n")
        out.flush()

    kinds = {kind.name: kind for kind in importlib.import_module(module).KINDS}
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process wherever it is, also inside of a library
    for name, first, last in left:
        kind, folder = kinds[name], home / name / "altered"
        valid = folder.with_name("valid")
        if not valid.is_dir():
            valid.mkdir(parents=True)
            kind.make(valid)
        right = kind.read(valid)
        most = _status("VmSize") + 4 * MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        for number in range(first, last):
            say({"begun": (name, number, "it is made")})
            say({"begun": (name, number, case(kind, number, folder))})
            is_refused, problem = _one(kind, right, folder)
            say({"is_refused": is_refused, "problem": problem})
    say(None)


def _one(kind: Kind, right: Any, folder: Path) -> tuple[bool, str]:
    """Whether a case was refused, and what was wrong."""
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _status("VmRSS"), time.process_time()
    values, refusal = None, ""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        values = kind.read(folder)
    except kind.errors as failure:
        refusal = str(failure) or "an error without a word"
        problem = _unreadable(refusal)
    except Exception as failure:
        refusal = problem = f"a traceback: {type(failure).__name__}: {failure}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    took, grown = time.process_time() - began, _status("VmHWM") - before
    if not refusal:
        problem = kind.wrong(right, folder, values)
    if grown > MORE_BYTES:
        problem += f" {grown >> 20} MiB of memory"
    if took > CPU_SECONDS:
        problem += f" {took:.1f} s"
    return bool(refusal), problem


def _unreadable(message: str) -> str:
    """What is wrong with a message of a refusal."""
    if not message.isprintable():
        return f"the message has signs that do not show: {message!r:.300}"
    if len(message) > MOST_SIGNS:
        return f"the message has {len(message)} signs: {message:.100}"
    return "" if re.search(r'\w "?\w', message) else f"the message is no sentence: {message}"


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)[1]) << 10


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):
        _child(given[0], given[1], Path(given[2]))
