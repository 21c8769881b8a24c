"""Trains a small GPT of which some blocks see a random part of the tokens (random-LTD), on any number of ranks.

mpispeed run -n 2 docs/examples/train_random_ltd.py --stage 3
mpispeed run -n 1 docs/examples/train_random_ltd.py --steps 100     # goes on from the checkpoint of the former
"""

from __future__ import annotations

import argparse
from typing import Any

from gpt import GPT, Block, Shape
from text import Windows, standard_library

import mpispeed
from mpispeed.nn.routing import convert_to_random_ltd

SHAPE = Shape(layers=12, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}


def routing(shape: Shape, steps: int) -> dict[str, Any]:
    """The section `data_efficiency`: upper blocks but the last see an eighth of the tokens, after `steps` all.

    The angles that turn queries and keys go along with their tokens.
    """
    growth = {"require_steps": steps, "seq_per_step": shape.block}  # no length between the first and the last
    length = {"min_value": shape.block // 8, "max_value": shape.block, "schedule_type": "fixed_linear"}
    ids = list(range(shape.layers // 2, shape.layers - 1))
    layers = {"total_layer_num": shape.layers, "random_ltd_layer_num": len(ids), "random_ltd_layer_id": ids}
    kind = {"model_type": "decoder", "hidden_state_order": "batch_seq_dim", "token_inputs": ["rotation"]}
    section = {"enabled": True, **layers, **kind, "random_ltd_schedule": {**length, "schedule_config": growth}}
    return {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}


def main() -> None:
    """Train and save; a second run goes on from there, with any number of ranks and stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--stage", 2), ("--steps", 50), ("--whole-from", 730)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="train_random_ltd")
    given = parser.parse_args()
    data = Windows(standard_library(cap_bytes=1_000_000)[0], SHAPE.block)
    config = CONFIG | {"zero_optimization": {"stage": given.stage}, "data_efficiency": routing(SHAPE, given.whole_from)}
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=data, config=config)
    convert_to_random_ltd(engine, Block)
    engine.load_checkpoint(given.out)
    batches, seen = iter(mpispeed.RepeatingLoader(loader)), engine.random_ltd_scheduler
    for step in range(engine.global_steps + 1, given.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and mpispeed.comm.get_rank() == 0:
            saved = 1 - seen.state["consumed_layer_tokens"] / (24 * SHAPE.layers * SHAPE.block * step)
            print(f"step {step} loss {loss.item():.3f} kept {seen.get_current_seq()} saved {saved:.3f}")
    engine.save_checkpoint(given.out)


if __name__ == "__main__":
    main()
