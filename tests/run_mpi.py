"""Runs the MPI tests: each group of files on 1, 2, 3 and 4 ranks, with a time limit and joined verdicts.

    python tests/run_mpi.py                                everything
    python tests/run_mpi.py -n 2,3 mesh -k sum             one group, some sizes, some tests
    python tests/run_mpi.py -n 4 sharding --durations 20   and which of them took longest
    python tests/run_mpi.py -n 3 --record a/3.json mesh    for a verdict over several calls:
    python tests/run_mpi.py --joined a

A group is a folder of tests/mpi, or the files that lie directly in it. This parent does not import MPI: a process
that has joined one world cannot start others. Ranks share one start-up per group and size, because importing torch
takes longer than most tests. The marker `ranks` names the sizes a test runs on where that is not all of them; each
group has to have tests on every size, and each test a size it runs on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpispeed.launch import plan_launch

TESTS = Path(__file__).resolve().parent / "mpi"
SIZES = [1, 2, 3, 4]
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
STACK_SECONDS = 2.0
SHOWN_LINES = 100
DISAGREE = "the ranks disagree"  # what tests/mpi/conftest.py writes on ranks that did not fail themselves
CAPTURE_TITLE = re.compile(r"-+ Captured \w+ -+")
FRAME_OF_RUNNER = re.compile(r"/(_?pytest|pluggy|mpi4py/run|mpi4py/__main__)[/.]|frozen runpy")
NO_TESTS = 5  # pytest's exit code when a filter left nothing


@dataclass
class Outcome:
    """What one start of a group on `ranks` ranks gave; names are those of tests, equal on all ranks."""

    group: str
    ranks: int
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    reports: dict[tuple[str, str], list[int]] = field(default_factory=dict)  # (test, text of the failure) -> ranks
    skipped: set[str] = field(default_factory=set)
    times: dict[str, float] = field(default_factory=dict)  # test -> seconds on the slowest rank
    broken: str = ""
    seconds: float = 0.0

    @property
    def has_failed(self) -> bool:
        """True if a test failed or the start itself did not end well."""
        return bool(self.failed or self.broken)

    def record(self) -> str:
        """JSON of what a verdict over several calls needs."""
        kept = {**asdict(self), "reports": {}, "times": {}}
        return json.dumps({name: sorted(value) if isinstance(value, set) else value for name, value in kept.items()})

    @classmethod
    def from_record(cls, text: str) -> Outcome:
        """What `record` wrote."""
        kept = json.loads(text)
        return cls(**{name: set(value) if isinstance(value, list) else value for name, value in kept.items()})

    def line(self) -> str:
        """One closing line."""
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"
        reason = f"  BROKEN: {self.broken}" if self.broken else ""
        return f"{self.group:12} {self.ranks} ranks  {counts} in {self.seconds:.1f} s{reason}"


def groups_of(folder: Path) -> dict[str, list[Path]]:
    """Group name -> what pytest is given; a new folder is a group by itself."""
    found = {path.name: [path] for path in sorted(folder.iterdir()) if path.is_dir() and any(path.rglob("test_*.py"))}
    files = sorted(folder.glob("test_*.py"))
    return {**({"top": files} if files else {}), **found}


def read_results(path: Path) -> Iterator[tuple[str, str, str, float]]:
    """(test, outcome, text of the failure, seconds) of every test in a rank's junit file."""
    for case in ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        texts = [child.text or child.get("message", "") for child in case if child.tag != "properties"]
        texts = [text for text in texts if CAPTURE_TITLE.sub("", text).strip()]
        name = f"{case.get('classname')}::{case.get('name')}"
        yield name, outcome, "\n".join(texts) if outcome == "failed" else "", float(case.get("time", 0))


def ranks_below(pid: int) -> list[int]:
    """Process ids of the Python ranks started below `pid`."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            except OSError:
                continue  # it ended while we looked
            parents[int(entry.name)], names[int(entry.name)] = int(rest.split()[1]), name
    found = []
    for candidate, name in names.items():
        above = candidate
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and candidate != pid and name.startswith("python"):
            found.append(candidate)
    return found


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask every rank for its stacks, then end the whole process group."""
    for pid in ranks_below(process.pid):
        os.kill(pid, signal.SIGUSR1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STACK_SECONDS)  # time for the ranks to write
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STACK_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_group(name: str, paths: list[Path], ranks: int, options: argparse.Namespace) -> Outcome:
    """Start one group once and read what its ranks report."""
    outcome = Outcome(name, ranks)
    with tempfile.TemporaryDirectory(prefix="mpispeed-tests-") as scratch:
        folder = Path(scratch)
        words = [sys.executable, __file__, "--as-rank", str(folder), *map(str, paths)]
        words += ["-k", options.keyword] if options.keyword else []
        launch = plan_launch(words, ranks, mpi=options.mpi)
        environment = {**os.environ, **launch.added, "OMP_NUM_THREADS": "1"}
        environment["MPISPEED_TEST_SECONDS"] = str(options.test_seconds)
        if ranks > len(os.sched_getaffinity(0)):
            # MPICH's waits sleep instead of asking again at once: other ranks compute on the same cores.
            environment.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
        began = time.monotonic()
        with (folder / "launcher.txt").open("w") as log:
            process = subprocess.Popen(
                launch.argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                outcome.broken = f"no end after {options.seconds:.0f} s"
                end_group(process)
            except KeyboardInterrupt:
                end_group(process)
                raise
        outcome.seconds = time.monotonic() - began
        collect(outcome, folder, process.returncode)
        if outcome.has_failed:
            show(outcome, folder)
    return outcome


def collect(outcome: Outcome, folder: Path, code: int | None) -> None:
    """Fill the outcome from the junit files of all ranks."""
    reported = 0
    for rank in range(outcome.ranks):
        path = folder / f"junit-{rank}.xml"
        if not path.exists():
            continue
        reported += 1
        for test, verdict, text, seconds in read_results(path):
            getattr(outcome, verdict).add(test)
            outcome.times[test] = max(outcome.times.get(test, 0.0), seconds)
            if text and DISAGREE not in text:
                outcome.reports.setdefault((test, text), []).append(rank)
    outcome.passed -= outcome.failed
    outcome.skipped -= outcome.failed | outcome.passed
    if outcome.broken:
        return
    if reported != outcome.ranks:
        outcome.broken = (
            f"{outcome.ranks - reported} of {outcome.ranks} ranks ended without a report (exit code {code})"
        )
    elif code and code != NO_TESTS and not outcome.failed:
        outcome.broken = f"exit code {code} without a failed test"


def show(outcome: Outcome, folder: Path) -> None:
    """Show the failures, once for the ranks that failed alike; of a broken start all logs and stacks."""
    for (test, text), ranks in outcome.reports.items():
        print(f"--- {test} on rank {', '.join(map(str, ranks))} of {outcome.ranks}\n{text}")
    logs = [folder / "launcher.txt", *sorted(folder.glob("rank-*.txt"))] if outcome.broken else []
    for path in logs:
        lines = path.read_text(errors="replace").splitlines()
        if lines:
            print(f"--- {path.stem}, last {min(len(lines), SHOWN_LINES)} of {len(lines)} lines")
            print("\n".join(lines[-SHOWN_LINES:]))
    for path in sorted(folder.glob("stacks-*.txt")):
        # Below the test there are only frames of pytest.
        lines = [line for line in path.read_text(errors="replace").splitlines() if not FRAME_OF_RUNNER.search(line)]
        if lines:
            print(f"--- {path.stem}\n" + "\n".join(lines))
    sys.stdout.flush()


def become_rank(folder: Path, words: list[str]) -> None:
    """Turn this process, started by mpirun, into pytest with its own log, report and temporary folder."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    log = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["MPISPEED_TEST_STACKS"] = str(folder / f"stacks-{rank}.txt")
    pytest = ["-m", "pytest", "--with-mpi", "--import-mode=importlib", "-p", "no:cacheprovider", "-o", "testpaths="]
    pytest += ["--no-header", "-o", "junit_logging=all", "-o", "junit_log_passing_tests=false"]
    own = [f"--junitxml={folder / f'junit-{rank}.xml'}", f"--basetemp={folder / f'tmp-{rank}'}"]
    os.execv(sys.executable, [sys.executable, "-m", "mpi4py", *pytest, *own, *words])


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Runs the MPI tests.")
    parser.add_argument("groups", nargs="*", help="folders of tests/mpi, or top; all by default")
    parser.add_argument("-n", "--ranks", default=",".join(map(str, SIZES)), help="numbers of ranks, by default 1,2,3,4")
    parser.add_argument("-k", "--keyword", default="", help="only tests that match, as in pytest")
    parser.add_argument("--mpi", default="auto", choices=("auto", "site"), help="as in mpispeed run")
    parser.add_argument("--seconds", type=float, default=1200, help="limit of one group on one number of ranks")
    parser.add_argument("--test-seconds", type=float, default=120, help="limit of one test")
    parser.add_argument("--durations", type=int, default=0, metavar="N", help="show the N slowest tests of each start")
    parser.add_argument("--record", type=Path, help="file for the outcome of one group on one number of ranks")
    parser.add_argument("--joined", type=Path, metavar="FOLDER", help="run nothing, judge what --record left there")
    return parser.parse_args(arguments)


def incomplete(outcomes: list[Outcome]) -> list[str]:
    """What a whole run lacks: a test that ran at no size proves nothing, nor does a group that has none at a size."""
    ran = {test for outcome in outcomes for test in outcome.passed | outcome.failed}
    never = {test for outcome in outcomes for test in outcome.skipped} - ran
    held = {(outcome.group, outcome.ranks) for outcome in outcomes if outcome.passed or outcome.has_failed}
    empty = [(name, ranks) for name in groups_of(TESTS) for ranks in SIZES if (name, ranks) not in held]
    lacks = [f"ran at no number of ranks: {test}" for test in sorted(never)]
    return lacks + [f"no test of group {name} ran on {ranks} ranks" for name, ranks in empty]


def conclude(outcomes: list[Outcome], is_filtered: bool) -> int:
    """Print the total."""
    passed = sum(len(outcome.passed) for outcome in outcomes)
    failed = sum(len(outcome.failed) + bool(outcome.broken) for outcome in outcomes)
    print()
    for outcome in outcomes:
        for test in sorted(outcome.failed):
            print(f"FAILED on {outcome.ranks} ranks: {test}")
    lacks = [] if is_filtered else incomplete(outcomes)
    if not passed and not failed:
        lacks.append("no MPI test ran at all")
    for text in lacks:
        print(f"FAILED: {text}")
    failed += len(lacks)
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


def judge(folder: Path) -> int:
    """Whether the recorded calls make a whole run together; their failures were told before."""
    lacks = incomplete([Outcome.from_record(path.read_text()) for path in sorted(folder.glob("*.json"))])
    for text in lacks:
        print(f"FAILED: {text}")
    print(f"{int(not lacks)} passed, {len(lacks)} failed")
    return int(bool(lacks))


def slowest(outcome: Outcome, count: int) -> str:
    """Lines of the tests that took longest."""
    times = sorted(outcome.times.items(), key=lambda item: -item[1])[:count]
    return "".join(f"\n    {seconds:7.2f} s  {test}" for test, seconds in times)


def main() -> int:
    """Run the groups one after the other."""
    if sys.argv[1:2] == ["--as-rank"]:
        become_rank(Path(sys.argv[2]), sys.argv[3:])
    options = parse(sys.argv[1:])
    if options.joined:
        return judge(options.joined)
    known = groups_of(TESTS)
    unknown = [name for name in options.groups if name not in known]
    if unknown:
        print(f"no group {', '.join(unknown)} in {TESTS}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    sizes = [int(word) for word in options.ranks.split(",")]
    outcomes = []
    for name in options.groups or known:
        for ranks in sizes:
            outcome = run_group(name, known[name], ranks, options)
            outcomes.append(outcome)
            print(outcome.line() + slowest(outcome, options.durations), flush=True)
    if options.record:
        options.record.write_text(outcomes[0].record())
    return conclude(outcomes, is_filtered=bool(options.keyword or options.groups) or sizes != SIZES)


if __name__ == "__main__":
    sys.exit(main())
