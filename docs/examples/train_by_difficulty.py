"""Measures windows of text, and trains a small GPT on the easy ones first, on any number of ranks.

mpispeed run -n 2 docs/examples/train_by_difficulty.py --steps 200
mpispeed run -n 3 docs/examples/train_by_difficulty.py --steps 400     # goes on with the samples that come next
"""

import argparse

import torch
from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed
from mpispeed.curriculum import DistributedDataAnalyzer

SHAPE = Shape(layers=4, heads=4, width=64, block=64)
TRAINING, HELD_OUT = (Windows(text, SHAPE.block) for text in standard_library(cap_bytes=1_000_000))
BITS = -(torch.bincount(TRAINING.text.long(), minlength=256).clamp(min=1) / len(TRAINING.text)).log2()
METRICS = {  # of batches (x, y) [batch, block]: bits of the bytes, and how many different ones there are
    "rarity": lambda batch: BITS[batch[0]].sum(1).long(),
    "variety": lambda batch: torch.zeros(len(batch[0]), 256).scatter(1, batch[0], 1.0).sum(1).long(),
}
RANGES = {"rarity": ("percentile", 20, 100), "variety": ("value", 25, SHAPE.block)}


def growth(folder: str, name: str, steps: int) -> dict:
    """The section of a metric, whose difficulty grows over its range within `steps`."""
    found = dict(zip(("difficulty_type", "min_difficulty", "max_difficulty"), RANGES[name], strict=True))
    found |= {f"{file}_path": f"{folder}/{name}/{name}_{file}" for file in ("index_to_sample", "index_to_metric")}
    numbers = {"total_curriculum_step": steps, "difficulty_step": 1, "root_degree": 2}
    return found | {"schedule_type": "fixed_root", "schedule_config": numbers}


def main() -> None:
    """Measure, train, save, and try the model on windows it has not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"steps": 200, "grow": 150, "out": "train_by_difficulty"}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given, comm = parser.parse_args(), mpispeed.init_distributed().comm
    what = {"metric_names": [*METRICS], "metric_functions": [*METRICS.values()], "save_path": f"{given.out}/metrics"}
    kinds = ["single_value_per_sample"] * len(METRICS)
    DistributedDataAnalyzer(TRAINING, comm=comm, batch_size=512, metric_types=kinds, **what).run_map_reduce()
    metrics = {name: growth(what["save_path"], name, given.grow) for name in METRICS}
    learning = {"enabled": True, "data_cluster_path": f"{given.out}/clusters", "curriculum_metrics": metrics}
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}
    config = {"train_batch_size": 24, "optimizer": {"type": "AdamW"}, "data_efficiency": efficiency}
    torch.manual_seed(0)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=TRAINING, config=config)
    engine.load_checkpoint(given.out)
    for _, batch in zip(range(engine.global_steps, given.steps), loader, strict=False):
        engine.backward(engine(*batch))
        engine.step()
    engine.save_checkpoint(given.out)
    x, y = (torch.stack(column) for column in zip(*(HELD_OUT[i] for i in range(0, 480, 4)), strict=True))
    loss = engine.eval()(x, y).item()
    print(f"step {engine.global_steps} {loader.state_dict()['current_difficulties']} held out: loss {loss:.6f}")


if __name__ == "__main__":
    main()
