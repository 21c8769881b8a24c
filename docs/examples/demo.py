"""The demonstration: trains a GPT on 2 ranks, resumes it on 3, and shows the curve and the checkpoint.

It uses the command line only, as a user would, and takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIRST_STEPS, LAST_STEPS = 760, 800
LIMIT = 2.0  # nats per byte; guessing by the frequency of bytes gives about 3.2


def main() -> None:
    """Run the steps of the demonstration; the first that fails ends it with exit code 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="begins anew each time (default %(default)s)"
    )
    out = parser.parse_args().out
    begin_anew(out)
    start = time.monotonic()
    train(out, ranks=2, options=["--steps", str(FIRST_STEPS), "--sample", "0"])
    train(out, ranks=3, options=["--steps", str(LAST_STEPS), "--eval_every", "20", "--resume"])
    mpispeed("ckpt", "ls", str(out / "checkpoints"))
    mpispeed("ckpt", "show", str(out / "checkpoints"))
    report(out, time.monotonic() - start)


def begin_anew(out: Path) -> None:
    """Remove what an earlier demonstration left in its folder."""
    if (out / "checkpoints").exists():
        print(f"removing the checkpoints of an earlier demonstration in {out}", flush=True)
        shutil.rmtree(out / "checkpoints")
    for name in ("loss.csv", "loss.png"):
        (out / name).unlink(missing_ok=True)


def train(out: Path, ranks: int, options: list[str]) -> None:
    """One run of the training script."""
    config = ["--deepspeed_config", str(HERE / "ds_config.json")]
    mpispeed("run", "-n", str(ranks), str(HERE / "train_gpt.py"), *config, "--out", str(out), *options)


def mpispeed(*arguments: str) -> None:
    """Run the `mpispeed` command that belongs to this Python, and show it."""
    print(f"\n$ mpispeed {shlex.join(arguments)}", flush=True)
    beside = Path(sys.executable).with_name("mpispeed")
    command = [str(beside)] if beside.exists() else [sys.executable, "-m", "mpispeed"]
    code = subprocess.run([*command, *arguments], check=False).returncode
    if code:
        fail(f"the command above ended with exit code {code}")


def report(out: Path, seconds: float) -> None:
    """Check the loss curve and say where everything is."""
    with (out / "loss.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    first, last = (float(rows[i]["validation_loss"]) for i in (0, -1))
    before = next((float(row["validation_loss"]) for row in rows if int(row["step"]) == FIRST_STEPS), None)
    if int(rows[-1]["step"]) != LAST_STEPS or rows[-1]["ranks"] != "3" or before is None:
        fail(f"{out / 'loss.csv'} does not go on from step {FIRST_STEPS} to {LAST_STEPS} on 3 ranks")
    if not last < LIMIT:
        fail(f"validation loss is {last:.3f} nats per byte after {LAST_STEPS} steps; below {LIMIT} was expected")
    print(
        f"\nvalidation loss {first:.3f} at step {rows[0]['step']}, {before:.3f} at step {FIRST_STEPS} on 2 ranks, "
        f"{last:.3f} at step {LAST_STEPS} on 3 ranks (nats per byte); {seconds:.0f} s in all"
    )
    for what, path in {"loss curve": "loss.png", "its numbers": "loss.csv", "checkpoints": "checkpoints"}.items():
        print(f"{what:12s} {(out / path).resolve()}")


def fail(reason: str) -> None:
    """End with one line and exit code 1."""
    print(f"demo failed: {reason}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
