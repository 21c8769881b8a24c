"""A healthy job with a slow and uneven data loader: nobody may claim that it hangs, and nobody may end it.

    python benchmarks/soak/healthy.py [--minutes 10] [-n 3] [--watch-seconds 3] [--json FILE]

Ranks train a small model at ZeRO stage 3 with overlapping communication; before a batch each rank may sleep, from
nothing to three times the limit by which a hang has to be named, and rank 0 evaluates alone now and then. Notices are
counted, since they are right; a report or a job that ends early is a failure.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "step"))


def train(seconds: float, watch_seconds: float) -> None:
    """What each rank does. Collective over: all ranks."""
    import torch

    import mpispeed
    from mpispeed import comm

    mpispeed.init_distributed()
    rank = comm.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = mpispeed.initialize(model=model, config=config)
    chance, end = random.Random(rank), torch.tensor([time.time() + seconds], dtype=torch.float64)
    comm.broadcast(end, 0)
    sleeps = 0
    while True:
        is_over = torch.tensor([float(time.time() > end.item())])
        comm.broadcast(is_over, 0)
        if is_over.item():
            break
        if chance.random() < 0.02:
            sleeps += 1
            time.sleep(chance.uniform(0, 3 * watch_seconds))
        loss = engine(torch.randn(4, 64)).square().mean()
        engine.backward(loss)
        engine.step()
    counts = torch.tensor([float(sleeps)])
    comm.all_reduce(counts)
    if rank == 0:
        print(f"steps {engine.global_steps} sleeps {counts.item():.0f}", flush=True)
    engine.destroy()


def main() -> int:
    """Start the job and look at how it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("-n", "--ranks", type=int, default=3)
    parser.add_argument("--watch-seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(60 * args.minutes, args.watch_seconds)
        return 0
    import peers

    own = [__file__, "--train", "--minutes", str(args.minutes), "--watch-seconds", str(args.watch_seconds)]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(args.ranks), "--run-dir", name, *own]
        settings = {"OMP_NUM_THREADS": "1", "MPISPEED_WATCH_SECONDS": str(args.watch_seconds)}
        begin = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **settings},
            timeout=60 * args.minutes + 300,
        )  # fmt: skip
        seconds = time.monotonic() - begin
        reports = [path.name for path in Path(name).glob("report*")]
    notices = done.stderr.count("mpispeed: notice: ")
    claims = done.stderr.count("mpispeed: ") - notices
    print(
        f"exit code {done.returncode} after {seconds:.0f} s; {done.stdout.strip()}; {notices} notices, {claims} claims"
    )
    if done.returncode or claims or reports:
        print(done.stderr)
    results = {
        "exit_code": done.returncode, "seconds": seconds, "notices": notices, "claims": claims, "reports": len(reports),
        "told": done.stdout.strip().splitlines()[-1:],
    }  # fmt: skip
    peers.write_record(args.json, "soak/healthy", {"ranks": args.ranks, "minutes": args.minutes,
                                            "watch_seconds": args.watch_seconds}, results)  # fmt: skip
    return int(bool(done.returncode or claims or reports))


if __name__ == "__main__":
    sys.exit(main())
