"""CPU time of a training step while its operations are counted, beside the same step without, on one thread.

    python benchmarks/flops/overhead.py [--rounds 15] [--json FILE]

Models are four transformer blocks of several widths; steps are forward and backward in one process. In every round all
ways run once, in turn; ratios are those of medians to the plain step's. "torch" is `FlopCounterMode`. "off" is the
plain step after a counter was made, started and stopped: it leaves nothing behind, so its ratio is noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

from mpispeed.flops.by_module import ModuleCounter

Step = Callable[[], None]


class Block(nn.Module):
    """A transformer block with fused attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(width // 64, 1)
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [batch, sequence, width]."""
        by_head = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


def ways(model: nn.Module, x: Tensor) -> dict[str, Step]:
    """Steps of the model, by name."""

    def plain() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    def counted(*, deepspeed: bool) -> Step:
        counter = ModuleCounter(model, deepspeed=deepspeed)

        def step() -> None:
            counter.start()
            plain()
            counter.stop()

        return step

    def by_torch() -> None:
        with FlopCounterMode(display=False):
            plain()

    off = ModuleCounter(model)
    off.start()
    off.stop()
    made = {"plain": plain, "off": plain, "both columns": counted(deepspeed=True), "ours": counted(deepspeed=False)}
    return made | {"torch": by_torch}


def measure(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if number > 1:
                seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for width, batch, length in ((64, 1, 32), (256, 4, 128), (512, 4, 256)):
        model = nn.Sequential(*(Block(width) for _ in range(4)))
        found = measure(ways(model, torch.randn(batch, length, width)), options.rounds)
        ratios = {name: round(seconds / found["plain"], 3) for name, seconds in found.items() if name != "plain"}
        results[f"width {width}, {batch * length} tokens"] = {"plain_ms": round(found["plain"] * 1e3, 3)} | ratios
        print(width, results[f"width {width}, {batch * length} tokens"], flush=True)
    peers.write_record(options.json, "flops/overhead", {"rounds": options.rounds}, results)


if __name__ == "__main__":
    main()
