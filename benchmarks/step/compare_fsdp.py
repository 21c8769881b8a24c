"""Tokens per second and memory of stages 1, 2 and 3 beside torch's DDP and FSDP2, and DeepSpeed's stages, on gloo.

    mpispeed run -n 2 benchmarks/step/compare_fsdp.py --json benchmarks/results/step-fsdp-82m.json
    python benchmarks/step/compare_fsdp.py --memory -n 2 --json benchmarks/results/memory-82m.json

With `--deepspeed FOLDER` DeepSpeed is there, too; install it with `pip install --target FOLDER --no-deps deepspeed
hjson py-cpuinfo ninja msgpack einops psutil`.

Speed: all contenders train the same GPT in fp32 from the same values on the same tokens, with AdamW and clipping
to norm 1, and take turns inside every round of one job. Two ratios to FSDP2 and to DDP are given: of the
medians, and the median of the rounds' ratios, which other load disturbs less. Each rank computes with one thread.

Memory: every contender runs in a job of its own, because peaks accumulate in a process. The peak of a rank
(VmHWM of Linux) is given for its whole life, and for the steps after the first two; before the model is made a rank
takes `idle`. A tensor that several ranks map counts in each of them (`shared`). Stages also give the bytes they
account for.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import peers
import torch

CLIPPING = 1.0
OWN = ("ddp", "fsdp2", "stage 0", "stage 1", "stage 2", "stage 3")
DEEPSPEED = ("deepspeed 1", "deepspeed 2", "deepspeed 3")
MIB = 1 << 20


def make(name: str, shape: tuple[int, ...], batch: int) -> tuple[peers.Step, Any]:
    """A contender's step, and its engine if it is one of ours."""
    torch.manual_seed(1)
    model = peers.GPT(*shape)
    if name == "ddp":
        return peers.make_ddp(model, CLIPPING), None
    if name == "fsdp2":
        return peers.make_fsdp(model, CLIPPING), None
    if name in DEEPSPEED:
        return peers.make_deepspeed(model, batch, int(name[-1]), CLIPPING), None
    engine = peers.make_engine(model, batch, {"stage": int(name[-1])}, CLIPPING)
    return peers.engine_step(engine), engine


def compare_speed(options: argparse.Namespace) -> None:
    """All contenders in turns. Collective over: all ranks."""
    world = peers.join_gloo()
    *shape, batch = peers.SIZES[options.size]
    ids = peers.token_ids(tuple(shape), batch // world.size, world.rank)
    steps = {name: functools.partial(make(name, tuple(shape), batch)[0], ids) for name in options.only}
    seconds = peers.take_turns(steps, world.comm.barrier, options.rounds, options.steps)
    if world.rank == 0:
        _report_speed(options, seconds, batch * peers.LENGTH, world.size)
    torch.distributed.destroy_process_group()


def _report_speed(options: argparse.Namespace, seconds: dict[str, list[float]], tokens: int, ranks: int) -> None:
    figures: dict[str, Any] = {}
    print(f"{options.size}, {ranks} ranks, {tokens} tokens per step, {options.rounds} rounds x {options.steps} steps")
    print("ratios: of medians (median of the rounds' ratios)")
    for name, times in seconds.items():
        median = statistics.median(times)
        figures[name] = {"seconds": times, "tokens_per_second": tokens / median}
        line = f"{name:11s} {tokens / median:9.1f} tokens/s"
        for base in ("ddp", "fsdp2"):
            if base in seconds:
                of_medians, by_round = peers.speed_ratios(seconds, base, name)
                figures[name] |= {f"ratio_to_{base}": of_medians, f"median_of_round_ratios_to_{base}": by_round}
                line += f"   {of_medians:5.3f} ({by_round:5.3f}) x {base}"
        print(f"{line}   spread {(max(times) - min(times)) / median:.0%}")
    peers.write_record(options.json, "step/compare_fsdp", _settings(options, ranks), figures)


def measure_memory(options: argparse.Namespace) -> None:
    """What this job's contender takes, written by rank 0. Collective over: all ranks."""
    world = peers.join_gloo()
    idle = _status()["VmRSS"]
    *shape, batch = peers.SIZES[options.size]
    (name,) = options.only
    step, engine = make(name, tuple(shape), batch)
    ids = peers.token_ids(tuple(shape), batch // world.size, world.rank)
    for _ in range(2):
        step(ids)
    until_trained = _status()["VmHWM"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    for _ in range(options.steps):
        step(ids)
    after = _status()
    own = {
        "idle": idle,
        "peak": max(until_trained, after["VmHWM"]),
        "peak_of_steps": after["VmHWM"],
        "shared": after["RssShmem"],
        **({} if engine is None else {f"accounted_{kind}": size for kind, size in _accounted(engine).items()}),
    }
    ranks = world.comm.gather_objects(own)
    if world.rank == 0:
        options.json.write_text(json.dumps({key: max(rank[key] for rank in ranks) for key in own}))
    torch.distributed.destroy_process_group()


def _status() -> dict[str, int]:
    """Units: bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1] == "kB"}


def _accounted(engine: Any) -> dict[str, int]:
    params, optimization = engine.parts.params, engine.parts.optimization
    return {
        "parameters": params.shards.param_bytes,
        "masters": params.shards.master_bytes,
        "gradients": optimization.grads.shards.rest_bytes,
        "optimizer_state": optimization.states.state_bytes,
    }


def compare_memory(options: argparse.Namespace) -> None:
    """One job for each contender, one after the other."""
    figures: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            path = Path(folder) / f"{name}.json"
            words = ["--measure", "--only", name, "--size", options.size, "--steps", str(options.steps)]
            words += ["--deepspeed", options.deepspeed] if options.deepspeed else []
            start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(options.ranks)]
            subprocess.run([*start, __file__, *words, "--json", str(path)], check=True)
            figures[name] = json.loads(path.read_text())
    print(f"{options.size}, {options.ranks} ranks, {options.steps} steps; the largest rank, MiB")
    print(f"{'':11s} {'peak':>8s} {'in steps':>9s} {'without idle':>13s} {'shared':>8s} {'accounted':>10s}")
    for name, row in figures.items():
        accounted = sum(size for key, size in row.items() if key.startswith("accounted"))
        cells = row["peak"], row["peak_of_steps"], row["peak_of_steps"] - row["idle"], row["shared"], accounted
        print("{:11s} {:8.0f} {:9.0f} {:13.0f} {:8.0f} {:10.0f}".format(name, *(size / MIB for size in cells)))
    peers.write_record(options.json, "step/compare_fsdp --memory", _settings(options, options.ranks), figures)


def _settings(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    return {"size": options.size, "rounds": options.rounds, "steps": options.steps, "ranks": ranks}


def main() -> None:
    """Speed in this job, or memory in jobs of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(peers.SIZES), default="82m")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="steps of each contender, in each round")
    parser.add_argument("--only", nargs="+", choices=[*OWN, *DEEPSPEED])
    parser.add_argument("--memory", action="store_true", help="measure memory; start it without mpirun")
    parser.add_argument("-n", "--ranks", type=int, default=2, help="ranks of the jobs that --memory starts")
    parser.add_argument("--measure", action="store_true", help="used by --memory for its jobs")
    parser.add_argument("--deepspeed", help="folder with an installed DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    options.only = options.only or [*OWN, *(DEEPSPEED if options.deepspeed else ())]
    if options.deepspeed:
        sys.path.append(options.deepspeed)
    (compare_memory if options.memory else measure_memory if options.measure else compare_speed)(options)


if __name__ == "__main__":
    main()
