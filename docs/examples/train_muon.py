"""Trains a small GPT with Muon for its matrices and AdamW for the rest, or with AdamW alone, on any number of ranks.

mpispeed run -n 2 docs/examples/train_muon.py --steps 200
mpispeed run -n 2 docs/examples/train_muon.py --steps 200 --optimizer AdamW     # the same data, at AdamW's best rate
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, Shape
from text import Windows, standard_library

import mpispeed

SHAPE = Shape(layers=3, heads=4, width=128, block=128)
OPTIMIZERS = {  # rates as benchmarks/step/muon_loss.py has tuned them
    "Muon": {"muon_lr": 8e-2, "adam_lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1},
}


def main() -> None:
    """Train, and validate at the end; a second run goes on from the checkpoint, with any number of ranks and stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--stage", 2), ("--steps", 200), ("--warmup", 50), ("--batch", 24)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Muon")
    parser.add_argument("--out", default="train_muon")
    given = parser.parse_args()
    warmup = {"warmup_num_steps": given.warmup, "warmup_type": "linear", "cos_min_ratio": 0.05}
    config = {
        "train_batch_size": given.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": given.optimizer, "params": OPTIMIZERS[given.optimizer]},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": given.steps, **warmup}},
        "zero_optimization": {"stage": given.stage},
    }
    training, held_out = (Windows(text, SHAPE.block) for text in standard_library())
    torch.manual_seed(1234)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=training, config=config)
    engine.load_checkpoint(given.out)
    batches = iter(mpispeed.RepeatingLoader(loader))
    while engine.global_steps < given.steps:
        engine.backward(engine(*next(batches)))
        engine.step()
    engine.save_checkpoint(given.out)
    engine.eval()
    x, y = (torch.stack(rows) for rows in zip(*(held_out[at] for at in range(0, len(held_out), 40)), strict=True))
    with torch.no_grad():
        loss = engine(x[:96], y[:96]).item()
    if mpispeed.comm.get_rank() == 0:
        print(f"step {engine.global_steps} validation loss {loss:.4f}")


if __name__ == "__main__":
    main()
