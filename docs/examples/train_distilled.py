"""Trains a small GPT, then a student with a third of its layers that learns from it; the teacher stays in shards.

mpispeed run -n 2 docs/examples/train_distilled.py
mpispeed run -n 2 docs/examples/train_distilled.py --alone     # the same student without its teacher
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from gpt import GPT, Shape
from text import Windows, standard_library
from torch.nn import functional as F

import mpispeed
from mpispeed.compression import Teacher, logits_loss, student_initialization

SHAPE = Shape(layers=6, heads=4, width=64, block=64)
LAYERS = {"enabled": True, "keep_number_layer": 2, "module_name_prefix": "blocks", "teacher_layer": [1, 4]}
REDUCTION = {"layer_reduction": {**LAYERS, "other_module_name": ["embedding", "norm", "head"]}}
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)


def train(who: str, model: GPT, config: dict[str, Any], steps: int, teacher: Teacher | None = None) -> None:
    """Train on bytes, and on the predictions of a teacher; the loss that is printed is that of the bytes."""
    engine, _, loader, _ = mpispeed.initialize(model=model, training_data=DATA, config=config)
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(1, steps + 1):
        x, y = next(batches)
        logits = engine(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        engine.backward(loss if teacher is None else loss + logits_loss(logits, teacher(x)))
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            print(f"{who} step {step} loss {loss.item():.3f}")
    engine.destroy()  # the model keeps its weights


def main() -> None:
    """Train the teacher, then the student."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of the student")
    parser.add_argument("--taught", type=int, default=1000, help="steps of the teacher")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--alone", action="store_true")
    given = parser.parse_args()
    config = CONFIG | {"zero_optimization": {"stage": given.stage}}
    model, student, teacher = GPT(SHAPE), GPT(dataclasses.replace(SHAPE, layers=2)), None
    if not given.alone:
        train("teacher", model, config, given.taught)
        student_initialization(student, model, {"compression_training": REDUCTION})
        teacher = Teacher(model, zero={"stage": 3})  # in files: "offload_param": {"device": "nvme", "nvme_path": ...}
    train("student", student, config, given.steps, teacher)


if __name__ == "__main__":
    main()
