"""200 steps of the demo's GPT at 1, 2, 3, 4, 6 and 12 ranks, and 2 -> 3 -> 1 on the way: all bits have to be equal.

    python benchmarks/step/invariant_bits.py --json benchmarks/results/invariant_bits.json

Dropout 0.1, clipping, bf16, a ZeRO stage of its own for each number of ranks. Losses are compared as hex, weights and
optimizer states by `mpispeed ckpt diff --bits`. More ranks than cores take turns: about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SLOTS, MICRO = 12, 2
STAGES = {1: 0, 2: 1, 3: 2, 4: 3, 6: 1, 12: 3}  # by ranks


def work(args: argparse.Namespace) -> None:
    """Train up to a step. Collective over: all ranks."""
    sys.path.insert(0, str(EXAMPLES))
    import torch
    from gpt import GPT, Shape
    from text import Windows, standard_library

    import mpispeed

    mpispeed.init_distributed()
    torch.manual_seed(1234)
    shape = Shape(layers=3, heads=4, width=128, block=128, dropout=0.1)
    config = {
        "train_batch_size": SLOTS * MICRO,
        "train_micro_batch_size_per_gpu": MICRO,
        "reduction": "invariant",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 5e-3}},
        "zero_optimization": {"stage": STAGES[mpispeed.comm.get_world_size()]},
        "steps_per_print": None,
    }
    data = Windows(standard_library(2_000_000)[0], shape.block)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(shape), training_data=data, config=config)
    engine.load_checkpoint(args.folder)
    batches, losses = iter(mpispeed.RepeatingLoader(loader)), []
    while engine.global_steps < args.until:
        losses.append(engine.train_batch(batches).hex())
    engine.save_checkpoint(args.folder)
    if mpispeed.comm.get_rank() == 0:
        with Path(args.folder, "losses.txt").open("a", encoding="utf-8") as file:
            file.writelines(f"{loss}\n" for loss in losses)
    engine.destroy()


def run(folder: Path, path: list[tuple[int, int]], dtype: str) -> None:
    """Start jobs one after the other: ranks, and the step up to which they train."""
    for ranks, until in path:
        job = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), __file__, "--folder", str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*job, "--until", str(until), "--dtype", dtype], check=True, env=environment)


def told(folder: Path, expected: Path) -> dict[str, Any]:
    """What a run left, and whether it is that of another."""
    losses = [each.joinpath("losses.txt").read_text(encoding="utf-8").splitlines() for each in (folder, expected)]
    command = [sys.executable, "-m", "mpispeed.cli.main", "ckpt"]
    compared = [*command, "diff", "--bits", str(folder), str(expected)]
    code = subprocess.run(compared, check=False).returncode
    checked = subprocess.run([*command, "verify", "--digest", "--json", str(folder)], check=True, capture_output=True)
    return {
        "steps": len(losses[0]),
        "last_loss": losses[0][-1],
        "losses_sha256": hashlib.sha256("\n".join(losses[0]).encode()).hexdigest(),
        "states": json.loads(checked.stdout)["digest"],
        "is_equal": losses[0] == losses[1] and code == 0,
    }


def main() -> None:
    """Run all of them, one after the other; exit code 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", default="1,2,3,4,6,12")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        work(args)
        return
    thirds = [args.steps * part // 3 for part in (1, 2, 3)]
    paths = {str(ranks): [(ranks, args.steps)] for ranks in map(int, args.ranks.split(","))}
    paths["2 -> 3 -> 1"] = list(zip((2, 3, 1), thirds, strict=True))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {name: Path(temporary, str(number)) for number, name in enumerate(paths)}
        for name, path in paths.items():
            run(folders[name], path, args.dtype)
            rows[name] = told(folders[name], folders[next(iter(paths))])
            print(f"{name} ranks: {rows[name]}", flush=True)
            if args.json:
                found = {"steps": args.steps, "dtype": args.dtype, "stages": STAGES, "ranks": rows}
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(row["is_equal"] for row in rows.values()))


if __name__ == "__main__":
    main()
