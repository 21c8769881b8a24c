"""`make gpu`: tests on this machine's GPU, several files at a time, then its benchmarks, one after the other.

    python tools/run_gpu.py                       everything
    python tools/run_gpu.py --no-tests optim      one benchmark
    python tools/run_gpu.py --results OUT         records to another folder than benchmarks/results

It ends with one line for each part, also after a failure, then one for each goal of the records, and with exit code 2
where there is no GPU. A part that fails or is ended at its limit leaves the others theirs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_figures

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks" / "gpu"
TESTS = (
    "-m",
    "pytest",
    "-v",
    "-p",
    "no:cacheprovider",
    "--durations=5",
    "-rs",
)  # -v: what a limit ends shows how far it was
DISK = "a folder of a local disk"
OPTIONS = {"offload": ("--path", DISK)}
"""What benchmarks are given beside the file of their record."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def test_parts() -> dict[str, tuple[str, ...]]:
    """What each process of the tests runs, by name, slow ones first: a file, or one tool of the sanitizer."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    sanitizer = "tests/gpu/test_sanitizer.py"
    slow = ["tests/gpu/test_engine.py", "tests/gpu/test_experts.py"]
    parts = {f"{sanitizer} {tool}": (sanitizer, "-k", tool) for tool in TOOLS}
    parts[f"{sanitizer} itself"] = (sanitizer, "-k", f"not ({' or '.join(TOOLS)})")
    return parts | {name: (name,) for name in [*slow, *sorted(files - {sanitizer, *slow})]}


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "timing")


def usable() -> str:
    """Why kernels cannot run here; "" if they can. Asked in a process of its own, which ends with its context."""
    ask = "from mpispeed.native.cuda import launcher; print(launcher.unusable_reason())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, cwd=ROOT, env=environment())
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-500:]


def environment() -> dict[str, str]:
    """This checkout is what runs, installed or not."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def run(name: str, words: tuple[str, ...], limit_seconds: float) -> tuple[str, bool]:
    """One process; gives the line that says how it ended, and whether it ended well."""
    print(f"=== {name}", flush=True)
    return _ended(name, words, limit_seconds)


def run_quietly(name: str, words: tuple[str, ...], limit_seconds: float, threads: int) -> tuple[str, bool]:
    """As `run`, beside others: what it says is printed when it has ended, and it has `threads` for the host's work."""
    with tempfile.TemporaryFile() as said:
        line, is_fine = _ended(
            name, words, limit_seconds, stdout=said, stderr=subprocess.STDOUT, OMP_NUM_THREADS=str(threads)
        )
        said.seek(0)
        print(f"=== {line}\n{said.read().decode(errors='replace')}", flush=True)
    return line, is_fine


def _ended(
    name: str, words: tuple[str, ...], limit_seconds: float, stdout: Any = None, stderr: Any = None, **variables: str
) -> tuple[str, bool]:
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment() | variables, stdout=stdout, stderr=stderr,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            code = process.wait(limit_seconds)
            how = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # what it started too, which would go on beside the next part
            how = f"ended after {limit_seconds:.0f} s, its limit"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return f"{name}: {how}, {time.monotonic() - began:.0f} s", how == "ok"


def run_tests(limit_seconds: float, jobs: int) -> list[tuple[str, bool]]:
    """All parts of the tests, so many at a time."""
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        parts = test_parts().items()
        return list(pool.map(lambda part: run_quietly(part[0], (*TESTS, *part[1]), limit_seconds, threads), parts))


def main() -> int:
    """Exit code 0 when all parts are fine, 1 when one is not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; default: all")
    parser.add_argument("--no-tests", action="store_true", help="benchmarks only")
    parser.add_argument("--no-benchmarks", action="store_true", help="tests only")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one part")
    parser.add_argument("--jobs", type=int, default=8, help="processes of tests at a time")
    parser.add_argument("--disk", type=Path, default=ROOT / "build", help="of a local disk, for states in files")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    if wrong := sorted(set(asked.benchmarks) - set(names())):
        parser.error(f"there is no benchmark {', '.join(wrong)}; there are {', '.join(names())}")
    if reason := usable():
        print(f"make gpu: kernels cannot run here: {reason}", file=sys.stderr)
        return 2
    ended = [] if asked.no_tests else run_tests(asked.limit, asked.jobs)
    chosen = [] if asked.no_benchmarks else asked.benchmarks or names()
    asked.results.mkdir(parents=True, exist_ok=True)
    asked.disk.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=asked.disk) as disk:
        for name in chosen:
            record = asked.results / f"gpu-{name.replace('_', '-')}.json"
            words = (str(BENCHMARKS / f"{name}.py"), "--json", str(record), *OPTIONS.get(name, ()))
            words = tuple(disk if word is DISK else word for word in words)
            ended.append(run(f"benchmarks/gpu/{name}.py", words, asked.limit))
    print("\n".join(line for line, _ in ended))
    if chosen:
        print("\n".join(gpu_figures.goals(asked.results)))
    return int(not all(is_fine for _, is_fine in ended))


if __name__ == "__main__":
    sys.exit(main())
