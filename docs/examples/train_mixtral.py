"""Trains a small Mixtral of transformers with its experts shared out over ranks, and saves it for transformers.

mpispeed run -n 4 docs/examples/train_mixtral.py --ep-size 2 --stage 3
"""

from __future__ import annotations

import argparse

from text import Windows, standard_library
from transformers import MixtralConfig, MixtralForCausalLM

import mpispeed

SHAPE = MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.01,
    output_router_logits=True, use_cache=False,
)  # fmt: skip
DATA = Windows(standard_library(cap_bytes=1_000_000)[0], 64)


def main() -> None:
    """Train, save, and read what was saved as any program with transformers would."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--ep-size", 1), ("--stage", 2), ("--steps", 50)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="train_mixtral")
    given = parser.parse_args()
    config = {
        "train_batch_size": 24,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": given.stage, "stage3_gather_16bit_weights_on_model_save": True},
        "expert_parallel": {"enabled": True, "autoep_size": given.ep_size},
    }
    engine, _, loader, _ = mpispeed.initialize(model=MixtralForCausalLM(SHAPE), training_data=DATA, config=config)
    batches, is_first = iter(mpispeed.RepeatingLoader(loader)), mpispeed.comm.get_rank() == 0
    for step in range(1, given.steps + 1):
        window, _ = next(batches)
        loss = engine(input_ids=window, labels=window).loss  # with that of the balance of experts
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and is_first:
            print(f"step {step} loss {loss.item():.3f}")
    engine.save_16bit_model(given.out)
    if is_first:
        SHAPE.save_pretrained(given.out)
        saved = MixtralForCausalLM.from_pretrained(given.out)
        print(f"saved loss {saved(input_ids=window, labels=window).loss.item():.3f}")


if __name__ == "__main__":
    main()
