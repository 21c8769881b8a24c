"""What states outside of a GPU cost one rank: the time of a step of a model of the shape of GPT-2 (124 M) in bf16.

    python benchmarks/gpu/offload.py                   plain torch, stages 2 and 3, states in host memory
    python benchmarks/gpu/offload.py --path FOLDER     also states in files of a local disk, and that disk alone

All sides train in bf16 with fp32 masters, clipping by the global norm and AdamW, 16 rows of 1024 tokens; they take
turns, each from an idle device to an idle device. In the same rounds the disk alone moves the bytes that an update
reads and writes (masters and both moments in fp32, gradients in the 16 bits in which they come), window by window:
reads and then writes, and both at once, which is the best that an update can come to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import need_gpu, parser_of, write_results
from torch import nn
from torch.nn import functional as F

import mpispeed
from mpispeed.base.device import module_of
from mpispeed.native.block_io import BlockFile, BlockIO, aligned

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import gpt

SHAPE, WORDS, ROWS = gpt.Shape(layers=12, heads=12, width=768, block=1024), 50257, 16
MEMORY_TARGET, DISK_TARGET = 1.6, 1.3
WINDOW = 1 << 24
STEPS = 4  # timed at a time
LR, CLIP, DECAY = 3e-4, 1.0, 0.01

CPU, PARAMS = {"device": "cpu", "pin_memory": True}, {"device": "cpu", "pin_memory": True}
SIDES: dict[str, dict[str, Any]] = {
    "stage 2": {"stage": 2},
    "stage 2, optimizer": {"stage": 2, "offload_optimizer": CPU},
    "stage 2, optimizer, pageable": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, optimizer": {"stage": 3, "offload_optimizer": CPU},
    "stage 3, optimizer and parameters": {"stage": 3, "offload_optimizer": CPU, "offload_param": PARAMS},
}
PIPELINED = {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
FILES: dict[str, dict[str, Any]] = {
    "stage 3, optimizer in files": {"stage": 3, "offload_optimizer": PIPELINED, "sub_group_size": WINDOW},
}

Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], object]


class Model(nn.Module):
    """The example GPT with GPT-2's vocabulary and tied weights, and its loss."""

    def __init__(self, shape: gpt.Shape, words: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = gpt.GPT(shape)
        self.model.embedding = nn.Embedding(words, shape.width)
        self.model.head = nn.Linear(shape.width, words, bias=False)
        gpt.initialise(self.model, shape)
        self.model.head.weight = self.model.embedding.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean over tokens."""
        return F.cross_entropy(self.model(x).float().flatten(0, 1), y.flatten())


def batch_of(shape: gpt.Shape, words: int, seed: int, rows: int) -> Batch:
    """On the host, page-locked: inputs and what follows them."""
    dice = torch.Generator().manual_seed(seed)
    first, step = (torch.randint(1, words, (rows, 1), generator=dice) for _ in range(2))
    tokens = (first + step * torch.arange(shape.block + 1)) % words
    return tokens[:, :-1].contiguous().pin_memory(), tokens[:, 1:].contiguous().pin_memory()


def plain_step(model: nn.Module, device: torch.device) -> Step:
    """One step of a loop without engine."""
    model = model.to(device)
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=DECAY, fused=device.type == "cuda")

    def step(batch: Batch) -> torch.Tensor:
        loss = model(*(part.to(device, non_blocking=True) for part in batch))
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        return loss.detach()

    return step


def engine_step(model: nn.Module, rows: int, section: Mapping[str, Any]) -> Step:
    """One step of an engine with this section zero_optimization."""
    settings = {
        "train_batch_size": rows,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "zero_optimization": dict(section),
        "steps_per_print": 10**9,
    }
    engine = mpispeed.initialize(model=model, config=settings)[0]

    def step(batch: Batch) -> torch.Tensor:
        loss = engine(*(part.to(engine.device, non_blocking=True) for part in batch))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def disk_alone(path: Path, elements: int, window: int) -> dict[str, Callable[[], object]]:
    """The bytes of one update by the disk alone."""
    io, file = BlockIO(), BlockFile(path / "offload-alone.bin", create=True)
    Path(file.path).unlink()
    sizes = [4 * window, 4 * window, 4 * window, 2 * window]  # master, two moments, gradient
    there, back = ([aligned(size, pin=True) for size in sizes] for _ in range(2))
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    count = max(-(-elements // window), 1)
    file.allocate(count * sum(sizes))

    def start(transfer: Callable[..., Any], buffers: list[torch.Tensor], k: int) -> list[Any]:
        places = (k * sum(sizes) + offset for offset in offsets)
        return [transfer(file, buffer, place) for buffer, place in zip(buffers, places, strict=True)]

    def finish(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def in_turns() -> None:
        for transfer, buffers in ((io.read, there), (io.write, back)):
            for k in range(count):
                finish(start(transfer, buffers, k))

    def at_once() -> None:
        for k in range(count + 1):
            works = start(io.read, there, k) if k < count else []
            finish(works + (start(io.write, back, k - 1) if k else []))

    for k in range(count):
        finish(start(io.write, back, k))
    return {"disk alone, in turns": in_turns, "disk alone, both ways": at_once}


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds, from an idle device to an idle device."""
    module_of(device).synchronize()
    begin = time.perf_counter()
    call()
    module_of(device).synchronize()
    return time.perf_counter() - begin


def measure(
    device: torch.device, rounds: int, path: Path | None, *,
    shape: gpt.Shape = SHAPE, words: int = WORDS, rows: int = ROWS, window: int = WINDOW,
) -> list[dict[str, Any]]:  # fmt: skip
    """Median step of each side, over that of plain torch or, of states in files, over the disk's own time."""
    sections = dict(SIDES)
    if path is not None:
        for name, section in FILES.items():
            files = section["offload_optimizer"] | {"nvme_path": str(path)}
            sections[name] = section | {"offload_optimizer": files, "sub_group_size": window}
    steps = {"plain torch": plain_step(Model(shape, words), device)}
    steps |= {name: engine_step(Model(shape, words), rows, section) for name, section in sections.items()}
    batches = [batch_of(shape, words, seed, rows) for seed in range(STEPS)]
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in steps}

    def train(name: str) -> None:
        losses[name] += [steps[name](batch) for batch in batches]

    calls: dict[str, tuple[Callable[[], object], int]] = {name: (partial(train, name), STEPS) for name in steps}
    if path is not None:
        elements = sum(param.numel() for param in Model(shape, words).parameters())
        calls |= {name: (call, 1) for name, call in disk_alone(path, elements, window).items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1 + rounds):
        for name, (call, steps_of_call) in calls.items():
            seconds = timed(call, device) / steps_of_call
            if turn:
                found[name].append(seconds)
    return _rows(found, {name: float(taken[-1]) for name, taken in losses.items()})


def _rows(found: Mapping[str, list[float]], losses: Mapping[str, float]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    plain, rows = medians["plain torch"], []
    for name, median in medians.items():
        row: dict[str, Any] = {"side": name, "step_seconds": median, "over_plain": median / plain}
        row |= {"last_loss": losses[name]} if name in losses else {}
        line = f"{name:36} {1e3 * median:9.2f} ms {median / plain:7.2f} x plain"
        for how in ("in turns", "both ways") if name in FILES else ():
            row[f"over_disk_{how.replace(' ', '_')}"] = over = median / medians[f"disk alone, {how}"]
            line += f" {over:7.2f} x the disk alone, {how}"
        rows.append(row)
        print(line)
    return rows


def main() -> None:
    """Measure, print, record."""
    parser: argparse.ArgumentParser = parser_of(__doc__)
    parser.add_argument("--path", type=Path, help="folder on a local disk")
    options = parser.parse_args()
    if options.path is not None and not options.path.is_dir():
        parser.error(f"--path {options.path} is no folder; name one on a local disk")
    rows = measure(need_gpu(), options.rounds, options.path)
    shown = vars(options) | {"path": None if options.path is None else "a local disk"}
    write_results("offload", rows, options=shown, path=options.json)
    for row in rows:
        if row["side"] in SIDES and row["over_plain"] > MEMORY_TARGET:
            print(f"{row['side']}: above the target of {MEMORY_TARGET} times plain torch")
        if row["side"] in FILES and row["over_disk_in_turns"] > DISK_TARGET:
            print(f"{row['side']}: above the target of {DISK_TARGET} times the disk's own time")


if __name__ == "__main__":
    main()
