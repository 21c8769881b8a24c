"""Products of layers that lost rows, columns and heads, and of packed weights, beside those of whole layers.

    python benchmarks/micro/compressed_products.py [--tokens 512] [--threads 1 2] [--json FILE]

    rows      the two products of an MLP of 768 and 3072, without its activation; rows of the first are removed
    heads     queries, keys, values and the output of attention of 768 in 12 heads; heads are removed
    packed    the MLP with weights as codes of 8 and of 4 bits, resident, one scale for each

`init_compression` and `redundancy_clean` make the layers; what is removed is a multiple of 16. The gain is the time of
whole layers by that of the cleaned ones, and its share the gain by what it would be in proportion to the products: 1.33
with 25 % removed, 2 with 50 %. All calls run in turn in every round; the best times of all rounds are compared.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import call_times
import torch
from call_times import Call
from torch import nn

from mpispeed.compression import init_compression, redundancy_clean
from mpispeed.compression.packed_layers import packed_weight

WIDTH, INNER, HEADS = 768, 3072, 12
GOAL = 0.85
REMOVED = (0.25, 0.5)


class MLP(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the second with that of the first."""
        out: torch.Tensor = self.last(self.first(x))
        return out


class Projections(nn.Module):
    """The four products of attention, without what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output's product with the others' sum."""
        out: torch.Tensor = self.out(self.query(x) + self.key(x) + self.value(x))
        return out


def section(technique: str, params: dict[str, Any], modules: list[str], related: Any, **shared: Any) -> dict[str, Any]:
    """A config with one technique, on from the first step."""
    group = {"params": params, "modules": modules} | ({} if related is None else {"related_modules": related})
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {
        "train_batch_size": 1,
        "compression_training": {technique: {"shared_parameters": shared, "different_groups": {"all": group}}},
    }


def rows(removed: float) -> dict[str, Any]:
    """Rows of the first product, and the columns of the second."""
    return section("row_pruning", {"dense_ratio": 1 - removed}, ["first"], [["last"]], method="l1")


def heads(removed: float) -> dict[str, Any]:
    """Columns of the last product, and the rows of the others."""
    related = [["query", "key", "value"]]
    return section("head_pruning", {"dense_ratio": 1 - removed}, ["out"], related, method="topk", num_heads=HEADS)


def bits(count: int) -> dict[str, Any]:
    """All weights as codes."""
    params = {"start_bits": count, "target_bits": count}
    return section("weight_quantization", params, ["*"], None, quantize_weight_in_forward=True)


def cleaned(model: nn.Module, config: dict[str, Any]) -> nn.Module:
    """A cleaned copy."""
    return redundancy_clean(init_compression(copy.deepcopy(model), config), config)


def held(model: nn.Module) -> int:
    """Bytes of parameters, and of codes and scales."""
    packed = [packed for layer in model.modules() if (packed := packed_weight(layer)) is not None]
    return sum(param.nbytes for param in model.parameters()) + sum(each.nbytes for each in packed)


def measure(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Milliseconds, gains and shares of every case."""
    torch.manual_seed(0)
    x, mlp, attention = torch.randn(options.tokens, WIDTH).to(dtype), MLP().to(dtype), Projections().to(dtype)
    cases: dict[str, tuple[nn.Module, nn.Module, float]] = {}
    for removed in REMOVED:
        keep = 1 - removed
        cases[f"rows, {removed:.0%} removed"] = (mlp, cleaned(mlp, rows(removed)), keep)
        cases[f"heads, {removed:.0%} removed"] = (attention, cleaned(attention, heads(removed)), keep)
    for count in (8, 4):
        cases[f"packed, {count} bits"] = (mlp, cleaned(mlp, bits(count)), 1.0)

    def call(model: nn.Module) -> Call:
        return lambda: model(x)

    calls = {name: (call(ours), call(whole)) for name, (whole, ours, _) in cases.items()}
    with torch.no_grad():
        best = call_times.best_in_turn(calls, options.rounds)
    found = {}
    for name, (ours, whole) in best.items():
        plain, model, keep = cases[name]
        found[name] = {"ms": 1e3 * ours, "whole_ms": 1e3 * whole, "gain": whole / ours, "share": whole / ours * keep}
        found[name] |= {"bytes": held(model), "whole_bytes": held(plain)}
    return found


def main() -> None:
    """Measure, print a table per dtype and number of threads, and write a record when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name, dtype, _ in call_times.settings(options.threads):
        found = results[name] = measure(options, dtype)
        print(f"{options.tokens} tokens in {name}, best of {options.rounds}")
        for case, row in found.items():
            goal = f"   share {row['share']:5.2f}, goal {GOAL}" if "removed" in case else ""
            size = row["bytes"] / row["whole_bytes"]
            print(
                f"  {case:20}{row['ms']:8.2f} ms   whole {row['whole_ms']:8.2f} ms   gain {row['gain']:5.2f}   "
                f"bytes {size:5.3f}{goal}"
            )
    call_times.write_record("micro/compressed_products", options, results, goals={"share": GOAL})


if __name__ == "__main__":
    main()
