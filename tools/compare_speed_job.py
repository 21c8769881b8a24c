"""One rank of tools/compare_speed.py: seconds of steps, saves, loads, pipelines, verbs and updates, by public names."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from same_bits_job import Block
from torch import nn

import mpispeed
from mpispeed import comm
from mpispeed.optim import CPUAdam
from mpispeed.pipe import LayerSpec, PipelineModule

WIDTH, LAYERS, ROWS = 256, 6, 16


def seconds(fn: Callable[[], object], repeat: int, *, warm: int = 1) -> float:
    """Median of `repeat` calls after `warm` ones, of this rank."""
    times = []
    for number in range(warm + repeat):
        comm.barrier()
        begin = time.perf_counter()
        fn()
        if number >= warm:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def config_of(stage: int) -> dict[str, Any]:
    """A config without anything that writes."""
    return {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def measure_stage(stage: int, folder: str, times: dict[str, float]) -> None:
    """A step at `stage`; at stage 3 making the engine and checkpoints too. Collective over: all ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))
    begin = time.perf_counter()
    engine, *_ = mpispeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(stage))
    times[f"initialize, stage {stage}"] = time.perf_counter() - begin
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    times[f"step, stage {stage}"] = seconds(step, 15, warm=3)
    if stage == 3:
        saved = f"{folder}/saved"
        times["checkpoint, save"] = seconds(lambda: engine.save_checkpoint(saved, "a"), 3)
        times["checkpoint, load"] = seconds(lambda: engine.load_checkpoint(saved, "a"), 3)
        comm.barrier()
        shutil.rmtree(saved, ignore_errors=True)
    engine.destroy()


def measure_pipeline(times: dict[str, float]) -> None:
    """A global batch of eight micro-batches over two stages. Collective over: all ranks."""
    layers = [*(LayerSpec(Block, WIDTH) for _ in range(LAYERS)), LayerSpec(nn.Linear, WIDTH, 7)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = {**config_of(1), "gradient_accumulation_steps": 8}
    engine, *_ = mpispeed.initialize(model=model, config=config)
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, 7))
    times["pipeline, train_batch"] = seconds(lambda: engine.train_batch(iter([batch] * 8)), 8, warm=2)
    engine.destroy()


def measure_verbs(times: dict[str, float]) -> None:
    """Small and large all-reduces and gathers. Collective over: all ranks."""
    for name, count in (("4 KiB", 1 << 10), ("16 MiB", 4 << 20)):
        full, half = torch.ones(count), torch.ones(count // comm.get_world_size())
        repeat = 200 if count < 1 << 12 else 8
        times[f"all_reduce, {name}"] = seconds(lambda full=full: comm.all_reduce(full), repeat, warm=3)  # type: ignore[misc]
        times[f"all_gather, {name}"] = seconds(
            lambda full=full, half=half: comm.all_gather_into_tensor(full, half), repeat, warm=3  # type: ignore[misc]
        )  # fmt: skip


def main() -> None:
    """Measure everything and write the times of rank 0."""
    folder, told = sys.argv[1:]
    times: dict[str, float] = {}
    mpispeed.init_distributed()
    for stage in (0, 1, 2, 3):
        measure_stage(stage, folder, times)
    measure_pipeline(times)
    measure_verbs(times)
    params = [torch.randn(1 << 20, requires_grad=True) for _ in range(4)]
    for param in params:
        param.grad = torch.randn_like(param)
    times["CPUAdam, 4M elements"] = seconds(CPUAdam(params).step, 10)
    if comm.get_rank() == 0:
        Path(told).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
