"""A training step of a mixture of experts: ours, torch's DDP, transformers' expert parallelism and DeepSpeed's.

    python benchmarks/moe/compare.py --json benchmarks/results/moe.json
    python benchmarks/moe/compare.py --deepspeed FOLDER ...  # with DeepSpeed, too; install it with pip install --target

The model is transformers' Qwen3-MoE with 59 million active parameters of 144 million: every other layer has 8 experts,
2 for a token. It trains on 1024 tokens a step, in fp32, one thread for each rank. Contenders:

    stage 3     ours: a rank holds its part of the experts, the rest of the model is cut by ZeRO; MPI
    all_to_all  transformers' own expert parallelism; the rest is cut by FSDP2, as at stage 3; gloo
    ddp         every rank holds all experts and sums the gradients of all; gloo
    deepspeed   DeepSpeed's layer without dropping, its engine at stage 2; gloo

Jobs with 2 and with 4 ranks compare, each in turns within every round and after losses were found equal:

    steps       whole training steps, ours beside one of the others, because of the memory
    rows        one layer whose experts return what they get, forward and backward: router, sort, permute, exchange and
                combine, ours and transformers'
    memory      (4 ranks) what a rank has for experts that are shared out over 1, 2 and 4 ranks

Ratios are times of the other over ours, of the medians and the median of the rounds' ratios, which other load disturbs
less. `outside` is the time in layers of experts less that of their products, with waits for other ranks, in the steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from contenders import (
    LAYERS,
    PRODUCTS,
    SIZES,
    Step,
    config,
    make,
    our_block,
    our_model,
    parameters,
    time_grouped_products,
    transformers_block,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

SAMPLES = 8  # of 128 tokens, on all ranks together
CHECKED_STEPS = 2
OTHERS = ("all_to_all", "ddp", "deepspeed")
Figures = dict[str, dict[str, Any]]


def make_all(options: argparse.Namespace, world: Any) -> dict[str, tuple[Step, Step]]:
    """The contenders of this job. Collective over: all ranks."""
    generator = torch.Generator().manual_seed(10 + world.rank)
    ids = torch.randint(0, SIZES[options.size][-1], (SAMPLES // world.size, peers.LENGTH), generator=generator)
    with tempfile.TemporaryDirectory() as own:
        folder = save_weights(options.size, own, world)
        made = {name: make(name, folder, ids, world.size) for name in options.only}
        world.comm.barrier()
    return made


def save_weights(size: str, own: str, world: Any) -> str:
    """Weights that all contenders start from, in a folder of the first rank. Collective over: all ranks."""
    folder: str = world.comm.share(own if world.rank == 0 else "")
    if world.rank == 0:
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(config(size)).save_pretrained(folder)
    world.comm.barrier()
    return folder


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """All compute the same, before any step and after some; sums of fp32 in other orders are within 1e-3 of it."""
    base = next(iter(losses.values()))
    for name, values in losses.items():
        if any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(values, base, strict=True)):
            msg = f"the contenders do not compute the same: losses of {name} are {values}, of the first {base}"
            raise SystemExit(msg)


def measure_steps(options: argparse.Namespace) -> Figures:
    """Whole steps. Collective over: all ranks."""
    world = peers.join_gloo()
    time_grouped_products()
    made = make_all(options, world)
    check_losses({name: [loss(), *(step() for _ in range(CHECKED_STEPS))] for name, (step, loss) in made.items()})
    found: Figures = {name: {"seconds": [], "layers": [], "products": []} for name in made}
    for _ in range(options.rounds):
        for name, (step, _) in made.items():
            LAYERS.seconds = PRODUCTS.seconds = 0.0
            world.comm.barrier()
            start = time.perf_counter()
            step()
            world.comm.barrier()
            seconds = time.perf_counter() - start
            parts = world.comm.gather_objects((LAYERS.seconds, PRODUCTS.seconds))
            layers, products = (statistics.mean(values) for values in zip(*parts, strict=True))
            for key, value in (("seconds", seconds), ("layers", layers), ("products", products)):
                found[name][key].append(value)
    return found


def measure_rows(options: argparse.Namespace) -> Figures:
    """The way to experts and back. Collective over: all ranks."""
    world = peers.join_gloo()
    mesh = torch.distributed.init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("ep", "tp"))
    blocks = {"ours": our_block(options.size, world.comm), "all_to_all": transformers_block(options.size, mesh)}
    generator = torch.Generator().manual_seed(10 + world.rank)
    shape = (SAMPLES // world.size, peers.LENGTH, SIZES[options.size][2])
    x, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    x.requires_grad_()

    def step(block: torch.nn.Module) -> torch.Tensor:
        x.grad = None
        y: torch.Tensor = block(x)
        y.backward(grad)
        return y.detach()

    for results in zip(*((step(block), x.grad) for block in blocks.values()), strict=True):
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    steps = {name: functools.partial(step, block) for name, block in blocks.items()}
    seconds = peers.take_turns(steps, world.comm.barrier, 20 * options.rounds, 2)
    return {name: {"seconds": times} for name, times in seconds.items()}


def measure_memory(options: argparse.Namespace) -> Figures:
    """Bytes of a rank after a step. Collective over: all ranks."""
    world = peers.join_gloo()
    found: Figures = {}
    with tempfile.TemporaryDirectory() as own:
        folder = save_weights(options.size, own, world)
        for ep_size in (1, 2, 4):
            model = our_model(folder, ep_size)
            engine = peers.make_engine(model, SAMPLES, {"stage": 0})
            ids = torch.zeros((SAMPLES // world.size, peers.LENGTH), dtype=torch.int64)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            experts = [param for name, param in model.named_parameters() if ".experts." in name]
            parts = engine.parts
            everything = parts.params.shards.param_bytes + parts.optimization.states.state_bytes
            found[f"ep_size {ep_size}"] = {
                "expert_parameters": sum(param.numel() * param.element_size() for param in experts),
                "parameters_and_states": everything + parts.optimization.grads.shards.rest_bytes,
            }
            del model, engine, experts, parts
    return found


MEASURES = {"steps": measure_steps, "rows": measure_rows, "memory": measure_memory}


def main() -> None:
    """Start the jobs and report, or be a rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="60m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--parts", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--others", nargs="+", choices=OTHERS, default=OTHERS, help="whom to compare steps with")
    parser.add_argument("--deepspeed", help="folder with an installed DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--measure", choices=MEASURES, help="used for the jobs")
    parser.add_argument("--only", nargs="+", help="used for the jobs")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if not options.measure:
        report(options)
        return
    if options.deepspeed:
        sys.path.append(options.deepspeed)
    found = MEASURES[options.measure](options)
    if torch.distributed.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def report(options: argparse.Namespace) -> None:
    """All jobs, one after the other."""
    results: dict[str, Any] = {"parameters": parameters(options.size)}
    others = [name for name in options.others if name != "deepspeed" or options.deepspeed]
    for ranks in options.ranks:
        if "rows" in options.parts:
            found = run_job(options, ranks, "rows", [])
            show(f"rows to experts and back, {ranks} ranks", found, "ours")
            results[f"rows, {ranks} ranks"] = found
        for other in others if "steps" in options.parts else ():
            found = run_job(options, ranks, "steps", ["stage 3", other])
            show(f"steps, {ranks} ranks", found, "stage 3")
            results[f"steps, {ranks} ranks, {other}"] = found
    if "memory" in options.parts:
        results["memory, 4 ranks"] = found = run_job(options, 4, "memory", [])
        for name, row in found.items():
            print(name, "  ".join(f"{key} {size / 2**20:.0f} MiB" for key, size in row.items()))
    shown = {"size": options.size, "samples": SAMPLES, "rounds": options.rounds, "steps_per_round": 1}
    peers.write_record(options.json, "moe/compare", shown, results)


def run_job(options: argparse.Namespace, ranks: int, measure: str, names: list[str]) -> Figures:
    """What one job finds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = ["--measure", measure, "--size", options.size, "--rounds", str(options.rounds), "--json", str(path)]
        words += ["--only", *names] if names else []
        words += ["--deepspeed", options.deepspeed] if options.deepspeed else []
        start = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), __file__]
        subprocess.run([*start, *words], check=True, stdout=subprocess.DEVNULL, env={**os.environ})
        found: Figures = json.loads(path.read_text())
    return found


def show(title: str, found: Figures, base: str) -> None:
    """Add ratios and print a table."""
    print(title, flush=True)
    for row in found.values():
        if "layers" in row:
            row["outside"] = [a - b for a, b in zip(row["layers"], row["products"], strict=True)]
    for name, row in found.items():
        line = f"  {name:11s}"
        for key in ("seconds", "outside"):
            if key not in row:
                continue
            turns = {other: each[key] for other, each in found.items()}
            # `speed_ratios` says how fast a contender is; this is how many times its time is ours.
            of_medians, by_round = peers.speed_ratios(turns, name, base)
            row[f"ratio_of_{key}"], row[f"median_of_round_ratios_of_{key}"] = of_medians, by_round
            line += f"   {key} {statistics.median(row[key]):8.4f} s {of_medians:6.2f} x (by round {by_round:6.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
