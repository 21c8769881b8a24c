"""`make gpu`: tests on this machine's GPU, then its benchmarks, whose records go to benchmarks/results.

    python tools/run_gpu.py                       everything
    python tools/run_gpu.py --no-tests optim      one benchmark
    python tools/run_gpu.py --results OUT         records to another folder

It ends with one line for each part, also after a failure, and with exit code 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

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
_WHOLE = ("tests/gpu/test_engine.py", "tests/gpu/test_comm.py", "tests/gpu/test_transformer_layer.py")
TEST_PARTS = {
    "tests/gpu of kernels": ("tests/gpu", *(f"--ignore={path}" for path in (*_WHOLE, "tests/gpu/test_sanitizer.py"))),
    "tests/gpu of engines and layers": _WHOLE,
    "tests/gpu/test_sanitizer.py": ("tests/gpu/test_sanitizer.py",),
}


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
    began = time.monotonic()
    try:
        code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment(), timeout=limit_seconds).returncode
        how = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        how = f"ended after {limit_seconds:.0f} s, its limit"
    return f"{name}: {how}, {time.monotonic() - began:.0f} s", how == "ok"


def main() -> int:
    """Exit code 0 when all parts are fine, 1 when one is not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; default: all")
    parser.add_argument("--no-tests", action="store_true", help="benchmarks only")
    parser.add_argument("--no-benchmarks", action="store_true", help="tests only")
    parser.add_argument("--limit", type=float, default=600, help="seconds of one part")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    if wrong := sorted(set(asked.benchmarks) - set(names())):
        parser.error(f"there is no benchmark {', '.join(wrong)}; there are {', '.join(names())}")
    if reason := usable():
        print(f"make gpu: kernels cannot run here: {reason}", file=sys.stderr)
        return 2
    parts = [] if asked.no_tests else [(name, (*TESTS, *words)) for name, words in TEST_PARTS.items()]
    for name in [] if asked.no_benchmarks else asked.benchmarks or names():
        record = str(asked.results / f"gpu-{name.replace('_', '-')}.json")
        parts.append((f"benchmarks/gpu/{name}.py", (str(BENCHMARKS / f"{name}.py"), "--json", record)))
        if name == "engine":
            shared = ("--ranks", "2", "--json", str(asked.results / "gpu-engine-2-ranks.json"))
            parts.append(("two ranks on one GPU", (str(BENCHMARKS / "engine.py"), *shared)))
    ended = [run(name, words, asked.limit) for name, words in parts]
    print("\n".join(line for line, _ in ended))
    return int(not all(is_fine for _, is_fine in ended))


if __name__ == "__main__":
    sys.exit(main())
