"""Trains the small GPT as a pipeline: stages x slices x data ranks.

    mpispeed run -n 4 docs/examples/train_pipeline.py --stages 2 --slices 2
    mpispeed run -n 4 docs/examples/train_pipeline.py --stages 2 --chunks 2 --schedule interleaved

The layers are in gpt_layers.py. What is not named by --stages and --slices is data parallel. A run can be resumed on
other numbers of all three.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Shape
from gpt_layers import SLICES, as_gpt, cross_entropy, layers
from text import Windows, standard_library

import mpispeed
from mpispeed import comm
from mpispeed.monitor import Console
from mpispeed.pipe import PipelineModule, PipeModelDataParallelTopology

HERE = Path(__file__).resolve().parent
VALIDATION_STEPS = 4


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2, help="ranks in a row, each with some of the layers")
    parser.add_argument("--slices", type=int, default=1, help="ranks that share every layer")
    parser.add_argument("--chunks", type=int, default=1, help="pieces of the model on each stage, for interleaving")
    parser.add_argument("--schedule", help="1f1b, gpipe, interleaved or zb-h1 (default: as the config says)")
    parser.add_argument("--config", type=Path, default=HERE / "pipeline_config.json")
    parser.add_argument("--steps", type=int, default=400, help="global steps of the whole run (default %(default)s)")
    parser.add_argument("--eval_every", type=int, default=50, help="steps between validations (default %(default)s)")
    parser.add_argument("--save_dir", type=Path, default=Path("runs/pipeline"), help="folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in SAVE_DIR")
    parser.add_argument("--cap_bytes", type=int, default=12_000_000, help="text to use at most (default %(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--block", type=int, default=64, help="context in bytes")
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to generate at the end")
    return parser.parse_args()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The config, with what depends on the command line."""
    config: dict[str, Any] = json.loads(args.config.read_text())
    if args.schedule is not None:
        config.setdefault("pipeline", {})["schedule"] = args.schedule
    if args.slices > 1:
        config["tensor_parallel"] = {"injection_policy_tuple": SLICES}
    return config


def make_model(args: argparse.Namespace, shape: Shape) -> PipelineModule:
    """The layers of this rank's stage. Collective over: all ranks."""
    copies = comm.get_world_size() // (args.stages * args.slices)
    return PipelineModule(
        layers(shape),
        topology=PipeModelDataParallelTopology(num_pp=args.stages, num_mp=args.slices, num_dp=copies),
        loss_fn=cross_entropy,
        seed_layers=True,  # the same weights whatever the numbers are
        num_chunks=args.chunks,
    )


def held_out_batches(engine: mpispeed.Engine, windows: Windows) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This data rank's micro-batches of the held-out text."""
    size, ranks = engine.train_micro_batch_size_per_gpu(), engine.mesh["data"].size
    first = engine.mesh.index("data") * size
    while True:
        pairs = [windows[index % len(windows)] for index in range(first, first + size)]
        x, y = zip(*pairs, strict=True)
        yield torch.stack(x), torch.stack(y)
        first += size * ranks


def train(engine: mpispeed.Engine, args: argparse.Namespace, held_out: Windows) -> None:
    """Run the loop up to step `args.steps`."""
    while engine.global_steps < args.steps:
        engine.train_batch()  # all micro-batches and the update; the data are those of initialize
        step = engine.global_steps
        if step % args.eval_every == 0 or step == args.steps:
            count = VALIDATION_STEPS * engine.gradient_accumulation_steps()
            loss = engine.eval_batch(held_out_batches(engine, held_out), num_micro_batches=count)
            if comm.get_rank() == 0:
                print(f"step {step}: validation loss {float(loss):.3f} nats per byte", flush=True)


def show_sample(args: argparse.Namespace, shape: Shape) -> None:
    """What the model writes. A checkpoint has whole weights, so one process without a pipeline can load them."""
    model = GPT(shape)
    model.load_state_dict(as_gpt(mpispeed.get_fp32_state_dict_from_zero_checkpoint(args.save_dir), shape))
    print(model.generate(b"def ", args.sample).decode("utf-8", errors="replace"), flush=True)


def main() -> None:
    """Build, train, save, and show what the model writes."""
    args = parse_arguments()
    mpispeed.init_distributed()
    shape = Shape(args.layers, args.heads, args.width, args.block)
    text, held_out = (Windows(part, args.block) for part in standard_library(args.cap_bytes))
    model = make_model(args, shape)
    engine, _, _, _ = mpispeed.initialize(model=model, training_data=text, config=settings(args))
    Console(args.steps, tokens_per_sample=args.block, steps_per_print=20).attach(engine.bus)
    if args.resume:
        engine.load_checkpoint(str(args.save_dir))
    train(engine, args, held_out)
    engine.save_checkpoint(str(args.save_dir), overwrite=True)
    if args.sample and comm.get_rank() == 0:
        show_sample(args, shape)
    comm.barrier()
    engine.destroy()


if __name__ == "__main__":
    main()
