"""States in 8 and 16 bits beside a copy of the same number of fp32 values; an update of Adam over coded moments.

    python benchmarks/micro/state_codes.py [--mib 64] [--window 65536] [--threads 1 2] [--rounds 9] [--json FILE]

    encode8, decode8   with and without signs; `drawn`: with random rounding
    round              fp32 to bf16 and fp16 at random
    split, join        pairs of bf16
    adam               one pass over coded moments, beside the same update of fp32 moments
    adam, drawn        the same with random rounding of the second moment
    adam, windows      moments decoded, updated and coded again by calls of their own, window by window

    engine ...         updates of an engine of one rank over its states, beside the same by windows that are decoded,
                       updated and encoded again; `copy_ratio` is by a copy that reads and writes the same bytes

A copy of fp32 reads and writes 8 bytes of an element; a code, 5 of them. Ratios are the time of the copy, or of the
update in fp32, by ours: below 1 ours is slower. All run in turn in every round, a call and what is beside it back to
back; medians are shown. Times of one thread are those of its processor, so that neighbours count less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

import mpispeed
from mpispeed.engine.build.parts import Parts
from mpispeed.native import coded_update, state_codes
from mpispeed.native.flat import DECAY_DECOUPLED, Terms
from mpispeed.native.multi_tensor_host import HostTable, Row
from mpispeed.optim.adam import Adam
from mpispeed.sharding.update_windows import UpdateWindows

TERMS = Terms(0.9, 0.999, step_size=1e-6, root_scale=18.0, eps=1e-8, decay=1e-7, decay_mode=DECAY_DECOUPLED)
HALF = torch.bfloat16
KAHAN, RANDOM = ({"master_dtype": "bf16", "master_rounding": rounding} for rounding in ("kahan", "stochastic"))
TYPES: dict[str, dict[str, Any]] = {
    "moments int8": {"optimizer_states": "int8"},
    "moments bf16": {"optimizer_states": "bf16"},
    "masters kahan, moments int8": {**KAHAN, "optimizer_states": "int8"},
    "masters stochastic, moments int8": {**RANDOM, "optimizer_states": "int8"},
}
"""By name, `data_types` of a bf16 model."""


def make_codecs(count: int, threads: int) -> dict[str, tuple[Call, Call]]:
    """Name -> (call, copy of as many fp32 values)."""
    x, out = torch.randn(count), torch.empty(count)
    squares, half, low = x * x, torch.empty(count, dtype=HALF), torch.empty(count, dtype=HALF)
    fp16 = torch.empty(count, dtype=torch.float16)
    codes, scales = torch.empty(count, dtype=torch.uint8), torch.empty(state_codes.scale_count(count))
    how: dict[str, Any] = {"threads": threads}
    drawn = {"seed": 1, "step": 1, **how}
    ours: dict[str, Call] = {
        "encode8 signed": lambda: state_codes.encode8(codes, scales, x, signed=True, **how),
        "decode8 signed": lambda: state_codes.decode8(out, codes, scales, signed=True, **how),
        "encode8 unsigned": lambda: state_codes.encode8(codes, scales, squares, signed=False, **how),
        "encode8 unsigned, drawn": lambda: state_codes.encode8(codes, scales, squares, signed=False, **drawn),
        "decode8 unsigned": lambda: state_codes.decode8(out, codes, scales, signed=False, **how),
        "round bf16": lambda: state_codes.round_stochastic(half, x, **drawn),
        "round fp16": lambda: state_codes.round_stochastic(fp16, x, **drawn),
        "encode16 bf16": lambda: state_codes.encode16(half, x, **how),
        "decode16 bf16": lambda: state_codes.decode16(out, half, **how),
        "split": lambda: state_codes.split(half, low, x, **how),
        "join": lambda: state_codes.join(out, half, low, **how),
    }
    return {name: (call, lambda: out.copy_(x)) for name, call in ours.items()}


def make_updates(count: int, window: int, threads: int) -> dict[str, tuple[Call, Call]]:
    """Name -> (update over codes, update of fp32 moments); both write the parameters in bf16 too."""
    param, grad, first = torch.randn(count), 0.01 * torch.randn(count), 0.01 * torch.randn(count)
    second, low = first * first, torch.empty(count, dtype=HALF)
    codes = [torch.empty(count, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.empty(state_codes.scale_count(count)) for _ in range(2)]
    for k, state in enumerate((first, second)):
        state_codes.encode8(codes[k], scales[k], state, signed=k == 0)
    scratch = [torch.empty(window) for _ in range(2)]
    cuts = [slice(at, at + window) for at in range(0, count, window)]
    rows = [([param[cut]], [grad[cut]], [low[cut]]) for cut in cuts]
    parts = [
        [(codes[k][cut], scales[k][cut.start // 256 : cut.stop // 256], scratch[k]) for k in range(2)] for cut in cuts
    ]
    tables = [HostTable("adam", [Row(params[0], tuple(scratch), grads[0], lows[0])]) for params, grads, lows in rows]
    whole = HostTable("adam", [Row(param, (first, second), grad, low)])

    def plain() -> None:
        whole.take([param], [grad], [low])
        whole.run([TERMS], threads=threads)

    def coded(seed: int | None) -> None:
        for cut, table, row, states in zip(cuts, tables, rows, parts, strict=True):
            for k, (code, scale, to) in enumerate(states):
                state_codes.decode8(to, code, scale, signed=k == 0, threads=threads)
            table.take(*row)
            table.run([TERMS], threads=threads)
            for k, (code, scale, x) in enumerate(states):
                draw: dict[str, Any] = {"seed": seed, "step": 1, "start": cut.start} if k else {}
                state_codes.encode8(code, scale, x, signed=k == 0, threads=threads, **draw)

    def fused(seed: int | None) -> None:
        states = [coded_update.Codes(codes[k], scales[k], k == 0, seed if k else None) for k in range(2)]
        coded_update.update("adam", param, states, grad, low, TERMS, step=1, threads=threads)

    return {
        "adam": (lambda: fused(None), plain),
        "adam, drawn": (lambda: fused(1), plain),
        "adam, windows": (lambda: coded(None), plain),
    }


class Rows(nn.Module):
    """Parameters of 2^20 elements each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(0.02 * torch.randn(1 << 20)) for _ in range(count >> 20)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all products."""
        return torch.stack([(row * x).sum().float() for row in self.rows]).sum()


class Windowed(Adam):
    """Adam whose windows are all in fp32."""

    def takes_codes(self, group: Any, step: int) -> bool:
        """False."""
        del group, step
        return False


def make_engine(types: dict[str, Any], count: int, threads: int) -> tuple[Call, Call, Call, Call]:
    """An engine's update, the same by windows, a copy of as many bytes as it reads and writes, and the end of all."""
    params = {"lr": 1e-4, "betas": [0.9, 0.999], "weight_decay": 0.01}
    config = {
        "train_batch_size": 1,
        "bf16": {"enabled": True},
        "data_types": types,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = mpispeed.initialize(model=Rows(count), config=config)
    engine.backward(engine(torch.randn(1 << 20, dtype=HALF)))
    parts: Parts = engine.mpispeed.parts
    optimization, shards = parts.optimization, parts.params.shards
    assert optimization is not None
    ours, kept = (
        (rule, UpdateWindows(shards, optimization.grads.shards, optimization.states, rule))
        for rule in (optimization.rule, Windowed(**optimization.rule.defaults))
    )

    def update(rule: Any, windows: UpdateWindows) -> None:
        rule.update(windows.windows(optimization.groups, 1), threads=threads)

    states = optimization.states.state_bytes + shards.master_bytes
    states += 0 if types.get("master_dtype") is None else 2 * count  # 16-bit masters are the parameters
    published = 2 * count if types.get("master_dtype") is None else 0
    moved = torch.empty((2 * states + 4 * count + published) // 2, dtype=torch.uint8)
    beside = torch.zeros_like(moved)
    return lambda: update(*ours), lambda: update(*kept), lambda: moved.copy_(beside), engine.destroy


def measure_engines(count: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds of an element and ratios of an engine's updates."""
    clock, found = time.thread_time if threads == 1 else time.perf_counter, {}
    for name, types in TYPES.items():
        *calls, end = make_engine(types, count, threads)
        torch.set_num_threads(threads)  # engines take what the host has for a rank
        (seconds,) = call_times.seconds_in_turn({name: calls}, rounds, clock).values()
        end()
        ours, windows, copy = map(statistics.median, seconds)
        found[f"engine, {name}"] = {
            "ns": 1e9 * ours / count,
            "beside_ns": 1e9 * windows / count,
            "ratio": windows / ours,
            "ratio_by_round": statistics.median(a / b for a, b in zip(seconds[1], seconds[0], strict=True)),
            "copy_ns": 1e9 * copy / count,
            "copy_ratio": copy / ours,
            "windows_copy_ratio": copy / windows,
        }
    return found


def measure(count: int, window: int, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds of an element and ratios of every call."""
    torch.set_num_threads(threads)
    calls = {**make_codecs(count, threads), **make_updates(count, window, threads)}
    clock = time.thread_time if threads == 1 else time.perf_counter
    found = {}
    for name, (ours, beside) in call_times.seconds_in_turn(calls, rounds, clock).items():
        of_medians, by_round = peers.speed_ratios({"beside": beside, "ours": ours}, "beside", "ours")
        found[name] = {
            "ns": 1e9 * statistics.median(ours) / count,
            "beside_ns": 1e9 * statistics.median(beside) / count,
            "ratio": of_medians,
            "ratio_by_round": by_round,
        }
    return found


def main() -> None:
    """Measure, print a table per number of threads, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the fp32 values")
    parser.add_argument("--window", type=int, default=1 << 16, help="elements of a window of the update")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    count = options.mib * 2**18 // options.window * options.window
    results: dict[str, Any] = {}
    for threads in options.threads:
        found = results[f"{threads} threads"] = measure(count, options.window, threads, options.rounds)
        found |= measure_engines(count, threads, options.rounds)
        print(f"{count} elements, {threads} threads, median of {options.rounds} rounds")
        for name, row in found.items():
            print(f"  {name:41}{row['ns']:7.3f} ns   beside {row['beside_ns']:7.3f} ns   {row['ratio']:5.2f}"
                  f"   by round {row['ratio_by_round']:5.2f}")  # fmt: skip
    shown = {"mib": options.mib, "window": options.window, "rounds": options.rounds}
    peers.write_record(options.json, "micro/state_codes", shown, results)


if __name__ == "__main__":
    main()
