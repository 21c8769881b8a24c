"""`make test`: plain tests, MPI tests on 1, 2, 3 and 4 ranks, whole jobs, jobs of SLURM, the package; then one total.

    python tools/run_tests.py                    everything
    python tools/run_tests.py --cores 1 rules    some parts, one piece after the other
    python tools/run_tests.py --keep             and keep what they took as tests/durations.json

The parts are cut into pieces of one process each. Pieces run side by side as far as the cores go, in the order of what
they took when durations were last kept, the longest first; what a piece prints is shown when it has ended, so that no
two mix. Tests of whole jobs that fail are tried once more by themselves, which is told: launchers and the clocks of a
shared machine are not ours. At the end stand those that have grown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
TIMES = "MPISPEED_TEST_TIMES"  # as tests/conftest.py reads it
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=3")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
KINDS = ("passed", "failed", "skipped")
RANKS = (1, 2, 3, 4)
MOST_CORES = 4
"""Taken without being asked: a container may own fewer cores than it sees."""

MOSTLY_WAITING = {
    "test_lost_node": 0,
    **dict.fromkeys(
        ("test_hangs", "test_exits", "test_walltime", "test_drills", "test_two_hosts", "test_restart"), 0.5
    ),
}
"""Jobs that wait for clocks and for ends of processes, and the share of a core that they were seen to use."""

LIMIT_SECONDS = 1500
"""Of one piece; MPI groups and jobs have their own, shorter ones."""

GROWN_FACTOR, GROWN_SECONDS = 1.3, 10
"""A piece has grown if it takes so many times and so much more than it did, on a machine of the same speed."""

TRIED_AGAIN = ("jobs", "slurm")
"""Parts whose failing tests are tried once more, if they are few."""

MOST_AGAIN = 3
FAILED = re.compile(r"^FAILED (\S+::[^\[\s]+(?:\[.*?\])?)(?= - |$)", re.MULTILINE)

BEAT_SECONDS = 60
POLL_SECONDS = 0.1
END_SECONDS = 10


@dataclass(frozen=True)
class Piece:
    """One process: the part it belongs to, its name, the words after `python`, and how many cores it keeps busy."""

    part: str
    name: str
    words: tuple[str, ...]
    cores: float = 1


@dataclass
class Result:
    """How a piece ended: its counts by kind, how long it took, and the time on cores of it and its children.

    `again` has its tests that failed first and passed when they were tried once more; they count as passed.
    """

    piece: Piece
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    again: tuple[str, ...] = ()


# -- what there is to run --------------------------------------------------------------------------------------------


def folders_with_tests(folder: Path) -> list[Path]:
    """Folders directly below that hold tests, in order."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and any(path.rglob("test_*.py")))


def size_of(path: Path) -> int:
    """How much test code there is; stands for how long it runs."""
    return sum(file.stat().st_size for file in path.rglob("test_*.py"))


def plain_pieces() -> Iterator[Piece]:
    """Unit tests by folder, the largest first, since a long one that comes last keeps a core waiting."""
    unit = ROOT / "tests" / "unit"
    for path in sorted(folders_with_tests(unit), key=size_of, reverse=True):
        yield Piece("unit", f"unit/{path.name}", (*PYTEST, str(path)))
    if files := sorted(unit.glob("test_*.py")):
        yield Piece("unit", "unit/*", (*PYTEST, *map(str, files)))
    yield Piece("property", "property", (*PYTEST, "tests/property"))
    yield Piece("rules", "rules", (*PYTEST, "tests/rules"))
    yield Piece("docs", "docs", (*PYTEST, "tests/docs"))
    # Without a GPU all of them are skipped, with the reason; what they import and what they are called is checked.
    yield Piece("gpu", "gpu", (*PYTEST, "tests/gpu"))


def mpi_pieces(records: Path) -> Iterator[Piece]:
    """A group on a number of ranks each; one rank first, because two of these run at a time."""
    mpi = ROOT / "tests" / "mpi"
    names = [path.name for path in sorted(folders_with_tests(mpi), key=size_of, reverse=True)]
    names += ["top"] if any(mpi.glob("test_*.py")) else []
    for ranks in RANKS:
        for name in names:
            record = records / f"{name}-{ranks}.json"
            words = ("tests/run_mpi.py", "-n", str(ranks), "--record", str(record), "--durations", "3", name)
            yield Piece("MPI", f"MPI {name} on {ranks}", words, ranks)


def all_pieces(records: Path) -> list[Piece]:
    """Everything, in the order in which it is begun: what takes one core first, the longest first.

    Jobs have several ranks, but are mostly starts of processes one after the other.
    """
    files = sorted((ROOT / "tests" / "jobs").rglob("test_*.py"), key=lambda path: path.stat().st_size, reverse=True)
    jobs = [
        Piece("jobs", f"jobs/{path.stem}", (*PYTEST, str(path)), cores=MOSTLY_WAITING.get(path.stem, 1))
        for path in files
    ]
    package = Piece("package", "package", ("tools/check_package.py",))
    # First of all, beside the others: its jobs wait for the clock, and use a twelfth of a core.
    slurm = Piece("slurm", "slurm", (*PYTEST, "tests/slurm"), cores=0)
    pieces = [slurm, *jobs, package, *plain_pieces(), *mpi_pieces(records)]
    took = kept_durations()
    return sorted(pieces, key=lambda piece: (piece.cores, -took.get(piece.name, float("inf"))))


# -- what it took ----------------------------------------------------------------------------------------------------


def kept_durations(kind: str = "pieces") -> dict[str, float]:
    """Seconds when they were last kept: of "pieces" on cores, of "files" of plain tests; empty if they never were."""
    if not DURATIONS.exists():
        return {}
    found: dict[str, float] = json.loads(DURATIONS.read_text())[kind]
    return found


def keep_durations(results: list[Result], times: Path) -> None:
    """Write what pieces and files took; those that did not run keep what they had, those that are no more go."""
    with tempfile.TemporaryDirectory() as folder:
        names = {piece.name for piece in all_pieces(Path(folder))}
    pieces = kept_durations() | {result.piece.name: result.cpu_seconds for result in results}
    files = kept_durations("files")
    for path in times.glob("*.json"):
        files |= json.loads(path.read_text())
    kept = {
        "pieces": {name: round(pieces[name], 1) for name in sorted(pieces) if name in names},
        "files": {name: round(files[name], 1) for name in sorted(files) if _is_plain(name)},
    }
    DURATIONS.write_text(json.dumps(kept, indent=1) + "\n")


def _is_plain(name: str) -> bool:
    return not name.startswith("tests/mpi/") and (ROOT / name).exists()


def growth(results: list[Result], kept: dict[str, float]) -> list[str]:
    """A line for each piece that takes longer than it did, by the speed of this machine, or is new."""
    known = [result for result in results if kept.get(result.piece.name, 0.0) >= 1.0]
    speed = statistics.median([r.cpu_seconds / kept[r.piece.name] for r in known]) if known else 1.0
    lines = []
    for result in results:
        name, now = result.piece.name, result.cpu_seconds / max(speed, 1e-9)
        if name in kept and now > max(kept[name] * GROWN_FACTOR, kept[name] + GROWN_SECONDS):
            lines.append(f"grown      {name}: {now:.0f} s on cores, {kept[name]:.0f} s when durations were kept")
        elif kept and name not in kept:
            lines.append(f"new        {name}: {now:.0f} s on cores")
    return lines


# -- running it ------------------------------------------------------------------------------------------------------


def cpu_of_children() -> float:
    """Seconds on cores of all children that have been waited for, theirs included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Running:
    """A piece that has been started; its output goes to a file of its own."""

    def __init__(self, piece: Piece, first: Result | None = None) -> None:
        """Start it; `first` is the result whose failed tests it tries once more."""
        self.piece, self.first = piece, first
        self.began = time.monotonic()
        self.is_late = False
        self.cpu_seconds = 0.0
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed with the result
        self.process = subprocess.Popen(
            [sys.executable, *piece.words],
            cwd=ROOT,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that a late one goes with all its children
        )

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self.began

    def has_ended(self, limit_seconds: float) -> bool:
        """True when the process has ended; one that is late is ended, and pytest writes its stacks at SIGABRT."""
        before = cpu_of_children()
        if self.seconds > limit_seconds and self.process.poll() is None:
            self.is_late = True
            self.end(signal.SIGABRT)
        if self.process.poll() is None:
            return False
        self.cpu_seconds = cpu_of_children() - before  # only this one was waited for in between
        return True

    def end(self, first: signal.Signals) -> None:
        """Tell the process, wait a little, then end its whole group."""
        self.process.send_signal(first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self) -> tuple[Result, str]:
        """The counts of its last line, and all it printed."""
        self.output.seek(0)
        text = self.output.read()
        self.output.close()
        result = Result(self.piece, seconds=self.seconds, cpu_seconds=self.cpu_seconds)
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        for number, kind in COUNT.findall(last):
            result.counts["failed" if kind.startswith("error") else kind] += int(number)
        code = self.process.returncode
        if code != 0 and not result.counts["failed"]:
            result.counts["failed"] = 1  # it ended before it could count
        if self.is_late:
            text += f"FAILED: {self.piece.name} still ran after {self.seconds:.0f} s\n"
        elif code == 0 and not any(result.counts.values()):
            result.counts["failed"] = 1
            text += f"FAILED: {self.piece.name} ended without a count of tests\n"
        return result, text


def run_all(
    pieces: list[Piece],
    cores: int,
    *,
    show: Callable[[str], None],
    beat_seconds: float = BEAT_SECONDS,
    limit_seconds: float = LIMIT_SECONDS,
) -> list[Result]:
    """Run the pieces, each as soon as its cores are free, also after a failure; shows every output in one go."""
    waiting, running, results = list(pieces), [], []
    again: list[tuple[Piece, Result]] = []
    began = beaten = time.monotonic()
    try:
        while waiting or running or again:
            free = cores - sum(min(one.piece.cores, cores) for one in running)
            if again and min(again[0][0].cores, cores) <= free:
                running.append(Running(*again.pop(0)))
                continue
            fitting = next((piece for piece in waiting if min(piece.cores, cores) <= free), None)
            if fitting is not None:
                waiting.remove(fitting)
                running.append(Running(fitting))
                continue
            for one in [one for one in running if one.has_ended(limit_seconds)]:
                running.remove(one)
                result, text = one.result()
                if one.first is not None:
                    judge_again(one.first, result)
                else:
                    results.append(result)
                    again += [(retry, result) for retry in retries(result, text) if not one.is_late]
                took = f"{result.seconds:.0f} s, {result.cpu_seconds:.0f} s on cores"
                show(f"=== {one.piece.name}\n{text}=== {one.piece.name}: {took}")
            if running and time.monotonic() - beaten >= beat_seconds:
                beaten = time.monotonic()
                names = ", ".join(f"{one.piece.name} ({one.seconds:.0f} s)" for one in running)
                failed = sum(result.counts["failed"] for result in results)
                done = f"{len(results)} of {len(pieces)} done, {failed} failed"
                show(f"... {beaten - began:.0f} s: {done}; running: {names}")
            time.sleep(POLL_SECONDS)
    finally:
        for one in running:
            one.end(signal.SIGINT)
    return results


def retries(result: Result, text: str) -> list[Piece]:
    """The piece that tries the failed tests of another once more; none where they are many or not all known."""
    found = FAILED.findall(text)
    if result.piece.part not in TRIED_AGAIN or not 0 < len(found) == result.counts["failed"] <= MOST_AGAIN:
        return []
    return [Piece(result.piece.part, f"{result.piece.name}, once more", (*PYTEST, *found), result.piece.cores)]


def judge_again(first: Result, second: Result) -> None:
    """Count the failures of `first` as passed if all of them pass in `second`; its time is theirs too."""
    first.seconds += second.seconds
    first.cpu_seconds += second.cpu_seconds
    count = first.counts["failed"]
    if second.counts["failed"] == 0 and second.counts["passed"] == count:
        first.again = second.piece.words[len(PYTEST) :]
        first.counts["failed"], first.counts["passed"] = 0, first.counts["passed"] + count


# -- telling it ------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def summary(results: list[Result], seconds: float, kept: dict[str, float] | None = None) -> str:
    """What each part took, which pieces have grown since they took `kept`, and the total as the last line."""
    lines = []
    for part in dict.fromkeys(result.piece.part for result in results):
        own = [result for result in results if result.piece.part == part]
        counts = ", ".join(f"{sum(result.counts[kind] for result in own)} {kind}" for kind in KINDS)
        took, used = sum(result.seconds for result in own), sum(result.cpu_seconds for result in own)
        lines.append(f"{part:10} {counts}; {len(own)} processes, {took:.0f} s, {used:.0f} s on cores")
    total = {kind: sum(result.counts[kind] for result in results) for kind in KINDS}
    skipped = f", {total['skipped']} skipped" if total["skipped"] else ""
    again = [name for result in results for name in result.again]
    lines += [f"once more  failed first, then passed: {name}" for name in again]
    lines += growth(results, kept_durations() if kept is None else kept)
    used = sum(result.cpu_seconds for result in results)
    lines.append(f"all parts  {seconds:.0f} s, {used:.0f} s on cores")
    twice = f" ({len(again)} when tried once more)" if again else ""
    lines.append(f"{total['passed']} passed{twice}, {total['failed']} failed{skipped}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Runs the tests.")
    parser.add_argument("parts", nargs="*", help="unit, rules, docs, MPI, jobs, slurm, package...; all by default")
    cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
    parser.add_argument("--keep", action="store_true", help="keep what the pieces took as tests/durations.json")
    parser.add_argument("--cores", type=int, default=cores, help=f"how many to keep busy, here by default {cores}")
    options = parser.parse_args()
    if options.cores < 1:
        parser.error(f"--cores {options.cores}: at least one core is needed")
    return options


def main() -> int:
    """Run all parts, also after a failure, so that one call shows everything."""
    options = parse()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: pieces are in sessions of their own
        signal.signal(number, lambda *_: sys.exit("stopped"))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mpispeed-records-") as folder:
        pieces = all_pieces(Path(folder))
        known = list(dict.fromkeys(piece.part for piece in pieces))
        if unknown := [part for part in options.parts if part not in known]:
            print(f"no part {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
            return 2
        wanted = [piece for piece in pieces if piece.part in (options.parts or known)]
        say(f"{len(wanted)} pieces on {options.cores} cores")
        times = Path(folder) / "times"
        times.mkdir()
        os.environ[TIMES] = str(times)
        results = run_all(wanted, options.cores, show=say)
        if any(piece.part == "MPI" for piece in wanted):
            # what only all numbers of ranks together can tell
            joined = Piece("MPI", "MPI on all numbers of ranks", ("tests/run_mpi.py", "--joined", folder))
            results += run_all([joined], 1, show=say)
        told = summary(results, time.monotonic() - began)
        if options.keep:
            keep_durations(results, times)
    say(told)
    return int(any(result.counts["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
