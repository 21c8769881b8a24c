"""Runs every pair of features on 4 ranks, and writes docs/reference/pairs.md and the data of its test.

    python tools/pairs.py                    all pairs; goes on where an earlier call was ended
    python tools/pairs.py --fresh            all pairs, from the first
    python tools/pairs.py --retry            goes on, and tries pairs again that failed
    python tools/pairs.py MiCS hpZ           this pair: prints what comes of it
    python tools/pairs.py MiCS               all pairs of this feature
    python tools/pairs.py MiCS --save        and puts them into the table
    python tools/pairs.py --check            compares what comes of all pairs with the table; writes nothing
    python tools/pairs.py --page             only writes the page anew, of the data that are there

A pair that hangs or ends its ranks is told as one that fails, and others go on. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mpispeed.launch import plan_launch  # noqa: E402
from tests.helpers import pairs_page  # noqa: E402
from tests.helpers.features import BY_NAME, FEATURES, Pair, all_pairs  # noqa: E402

WORK = ROOT / "build" / "pairs"
RANKS, OTHERS = 4, 2
LIMIT_SECONDS, START_SECONDS = 90.0, 180.0
"""Most time of one pair, and of a start with the pairs of other ranks."""
OTHER = "loaded by other ranks"
KEPT_PAIRS = 250
"""Pairs of one process: groups of ranks and warnings that are given once do not pile up for ever."""


def wanted(names: list[str]) -> list[Pair]:
    """Each feature alone, then all pairs; with names those of them."""
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        sys.exit(f"there is no feature {unknown[0]!r}; there are: {', '.join(BY_NAME)}")
    every = [(feature, feature) for feature in FEATURES] + list(all_pairs())
    return [pair for pair in every if set(names) <= {feature.name for feature in pair}]


def start(phase: str, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    """One start of ranks that work on FOLDER/todo.json."""
    launch = plan_launch([sys.executable, "-m", "mpi4py", __file__, "--as-rank", phase, str(folder)], ranks)
    environment = {**os.environ, **launch.added, "OMP_NUM_THREADS": "1", "MPISPEED_RANKS_PER_NODE": "2"}
    if ranks > len(os.sched_getaffinity(0)):
        environment.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            launch.argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a start and all its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    process.wait()


def read(path: Path) -> list[dict[str, object]]:
    """Lines that are whole."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def attend(process: subprocess.Popen[bytes], path: Path) -> str:
    """Wait for the end of a start; why it is no good end, or ""."""
    size, last = -1, time.monotonic() + START_SECONDS - LIMIT_SECONDS
    try:
        while process.poll() is None:
            time.sleep(0.2)
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                last = max(time.monotonic(), last if size < 1 else 0.0)
                size = now
            if time.monotonic() - last > LIMIT_SECONDS:
                return f"no end after {LIMIT_SECONDS:.0f} s"
    finally:
        if process.poll() is None:
            end(process)
    return f"ranks ended with code {process.returncode}" if process.returncode else ""


def run_all(pairs: list[Pair], folder: Path) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(first, second, outcome) of all pairs, in starts as long as there are any."""
    if any(OTHER in {first.name, second.name} for first, second in pairs):
        prepare(pairs, folder)
    todo = [[first.name, second.name] for first, second in pairs]
    while todo:
        (folder / "todo.json").write_text(json.dumps(todo[:KEPT_PAIRS]))
        (folder / "done.jsonl").unlink(missing_ok=True)
        why = attend(start("pairs", RANKS, folder), folder / "done.jsonl")
        lines = read(folder / "done.jsonl")
        done = [line for line in lines if "outcome" in line]
        for line in done:
            yield *line["pair"], line["outcome"]  # type: ignore[misc]
        todo = todo[len(done) :]
        if lines and "outcome" not in lines[-1]:
            yield *todo[0], {"result": "fails", "text": why or "ranks ended"}  # type: ignore[misc]
            todo = todo[1:]
        elif why and not done:
            sys.exit(f"ranks cannot be started: {why}\n{(folder / 'log.txt').read_text()[-3000:]}")


def prepare(pairs: list[Pair], folder: Path) -> None:
    """Checkpoints of a job of other ranks; a feature that ends it is told by its pair."""
    names = {feature.name for pair in pairs for feature in pair if OTHER in {one.name for one in pair}}
    told = [name for name in names if (folder / BY_NAME[name].key / "told.json").exists()]
    todo = [name for name in BY_NAME if name in names and name not in told]
    while todo:
        (folder / "todo.json").write_text(json.dumps(todo))
        (folder / "saved.jsonl").unlink(missing_ok=True)
        why = attend(start("save", OTHERS, folder), folder / "saved.jsonl")
        lines = read(folder / "saved.jsonl")
        done = [line for line in lines if "saved" in line]
        todo = todo[len(done) :]
        if not why or not todo:
            return
        broken = BY_NAME[todo[0]].key
        (folder / broken).mkdir(exist_ok=True)
        (folder / broken / "told.json").write_text(json.dumps({"failed": f"on {OTHERS} ranks: {why}"}))
        todo = todo[1:]


def become_rank(phase: str, folder: Path) -> int:
    """A rank of a start: work, and write a line before and after each pair."""
    import mpispeed
    from tests.helpers import pairs

    rank = mpispeed.init_distributed().rank
    pairs.share_folder(folder)
    out = (folder / ("saved.jsonl" if phase == "save" else "done.jsonl")).open("a") if rank == 0 else None

    def tell(line: dict[str, object]) -> None:
        if out is not None:
            out.write(json.dumps(line) + "\n")
            out.flush()

    for item in json.loads((folder / "todo.json").read_text()):
        if phase == "save":
            tell({"next": item})
            pairs.save_for_others(BY_NAME[item])
            tell({"saved": item})
            continue
        tell({"pair": item})
        began = time.monotonic()
        outcome = pairs.try_pair(*(BY_NAME[name] for name in item))
        tell({"pair": item, "outcome": outcome.fields(), "seconds": round(time.monotonic() - began, 2)})
        if outcome.result == pairs.FAILS:
            mpispeed.init_distributed().comm.barrier()  # a rank that leaves ends the others
            os._exit(0)  # nobody knows what it left behind
    return 0


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="features; all pairs by default")
    words = {
        "fresh": "forget what an earlier call found",
        "retry": "forget which pairs failed",
        "check": "compare with the table",
        "page": "write the page anew",
        "save": "with names: change the table",
    }
    for word, what in words.items():
        parser.add_argument(f"--{word}", action="store_true", help=what)
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run, compare or write."""
    options = parse()
    if options.as_rank:
        return become_rank(options.as_rank[0], Path(options.as_rank[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the next call goes on"))
    if options.page:
        pairs_page.write(pairs_page.load())
        return 0
    is_part = bool(options.names)
    if options.fresh or options.check:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    kept = WORK / "outcomes.jsonl"
    found = {} if is_part else taken_over(kept)
    if options.retry:
        found = {pair: outcome for pair, outcome in found.items() if outcome["result"] != "fails"}
    left = [pair for pair in wanted(options.names) if (pair[0].name, pair[1].name) not in found]
    with tempfile.TemporaryDirectory(prefix="mpispeed-pairs-") as scratch:
        for first, second, outcome in run_all(left, Path(scratch) if is_part else WORK):
            found[first, second] = outcome
            if is_part or outcome["result"] == "fails":
                print(f"{first} with {second}: {outcome}", flush=True)
            if not is_part:
                keep(kept, [first, second], outcome)
    if not is_part:
        return compare(found) if options.check else conclude(found)
    if options.save:
        pairs_page.save({**pairs_page.load(), **found})
        pairs_page.write(pairs_page.load())
    return 0


def keep(kept: Path, pair: list[str], outcome: dict[str, str]) -> None:
    """Add an outcome to those that the next call finds."""
    with kept.open("a") as file:
        file.write(json.dumps({"pair": pair, "outcome": outcome}) + "\n")


def taken_over(kept: Path) -> dict[tuple[str, str], dict[str, str]]:
    """What earlier calls found, and what the ranks of one had told when it was ended."""
    rows = read(kept)
    for line in read(WORK / "done.jsonl"):
        if "outcome" in line and line["pair"] not in [row["pair"] for row in rows]:
            keep(kept, line["pair"], line["outcome"])  # type: ignore[arg-type]
            rows.append(line)
    return {tuple(row["pair"]): row["outcome"] for row in rows}  # type: ignore[arg-type, misc]


def conclude(found: dict[tuple[str, str], dict[str, str]]) -> int:
    """Write data and page; 1 if a pair fails."""
    pairs_page.save(found)
    pairs_page.write(pairs_page.load())
    shutil.rmtree(WORK)
    print(pairs_page.counted(found))
    return int(any(outcome["result"] == "fails" for outcome in found.values()))


def compare(found: dict[tuple[str, str], dict[str, str]]) -> int:
    """1 if the table says something else of a pair."""
    table = pairs_page.load()
    wrong = [
        f"{' with '.join(pair)}: {said} in the table, and now {now}"
        for pair, now in found.items()
        if (said := pairs_page.differs(table.get(pair), now)) is not None
    ]
    print("\n".join([*wrong, pairs_page.counted(found)]))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
