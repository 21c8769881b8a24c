"""Trains a small GPT on the sources of the standard library, on any number of ranks.

    mpispeed run -n 2 docs/examples/train_gpt.py --deepspeed_config docs/examples/ds_config.json --steps 800

Only `mpispeed.initialize`, the three calls on the engine in the training loop, and the line that makes parameters whole
before text is generated are not plain torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import curve
import torch
from gpt import GPT, Shape
from text import Windows, standard_library
from torch.utils.data import DataLoader, Subset

import mpispeed
from mpispeed import comm
from mpispeed.monitor import Console, Event

VALIDATION_WINDOWS = 240


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="global steps of the whole run (default %(default)s)")
    parser.add_argument("--eval_every", type=int, default=40, help="steps between validations (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="loss.csv and loss.png go here")
    parser.add_argument("--save_dir", type=Path, help="folder of checkpoints (default OUT/checkpoints)")
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0: at the end only")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in SAVE_DIR")
    parser.add_argument("--cap_bytes", type=int, default=12_000_000, help="text to use at most (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--block", type=int, default=128, help="context in bytes")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1234, help="seed of the initial weights")
    parser.add_argument("--sample", type=int, default=300, help="bytes of text to generate at the end")
    parser.add_argument("--local_rank", type=int, default=-1, help="accepted from launchers that pass it")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    args = mpispeed.add_config_arguments(parser).parse_args()
    args.save_dir = args.save_dir or args.out / "checkpoints"
    return args


def validate(engine: mpispeed.Engine, batches: DataLoader) -> float:
    """Mean loss over this rank's held-out windows and those of all other ranks.

    Collective over: all ranks.
    """
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of windows
    with torch.no_grad():
        for x, y in batches:
            total += torch.tensor([engine(x, y).item() * len(x), len(x)])
    engine.train()
    comm.all_reduce(total)
    return float(total[0] / total[1])


def mean_over_ranks(value: float) -> float:
    """Collective over: all ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    comm.all_reduce(total)
    return float(total) / comm.get_world_size()


def stop(message: str) -> NoReturn:
    """End the run for a mistake that every rank knows of: one line, exit code 2."""
    if comm.get_rank() == 0:
        print(f"train_gpt: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def check(args: argparse.Namespace, *texts: Windows) -> None:
    """End the run if it cannot work with these arguments, before anything is built. Collective over: all ranks."""
    if args.heads < 1 or args.width % (2 * args.heads):
        stop(f"--width {args.width} is no multiple of 2 x --heads {args.heads}; every head needs an even share")
    if min(len(text) for text in texts) < 1:
        stop(f"--cap_bytes {args.cap_bytes} leaves no window of --block {args.block} bytes and one; raise it")
    failure = torch.zeros(1)
    if comm.get_rank() == 0:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError:
            failure += 1
    comm.all_reduce(failure)
    if failure.item():
        stop(f"--out {args.out} cannot be made a folder on rank 0; name another")


def resume(engine: mpispeed.Engine, folder: Path) -> None:
    """Load the latest checkpoint, or end the run if there is none. Collective over: all ranks."""
    path, _ = engine.load_checkpoint(str(folder))
    if path is None:
        stop(f"nothing to resume from in {folder}; leave --resume away to start")


def train(engine: mpispeed.Engine, args: argparse.Namespace, held_out: DataLoader) -> None:
    """Run the loop up to step `args.steps`, with validations, points of the curve, and checkpoints."""
    points = curve.read(args.out / "loss.csv", last_step=engine.global_steps) if args.resume else []
    loss_sum, step = 0.0, engine.global_steps
    last_step = step  # of the last validation
    batches = iter(mpispeed.RepeatingLoader(engine.training_dataloader))
    while engine.global_steps < args.steps:
        x, y = next(batches)
        loss = engine(x, y)
        loss_sum += engine.backward(loss).item()
        engine.step()

        if engine.global_steps == step:
            continue  # a micro-batch within a global batch
        step = engine.global_steps
        if step % args.eval_every == 0 or step == args.steps:
            train_loss = mean_over_ranks(loss_sum / (step - last_step))
            validation_loss = validate(engine, held_out)
            engine.bus.announce(Event.EVAL_END, global_step=step, samples=engine.global_samples, loss=validation_loss)
            points.append(curve.Point(step, engine.global_samples, comm.get_world_size(), train_loss, validation_loss))
            if comm.get_rank() == 0:
                curve.write(args.out / "loss.csv", points)
            loss_sum, last_step = 0.0, step
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            engine.save_checkpoint(str(args.save_dir), overwrite=True)
    if comm.get_rank() == 0 and points:
        curve.draw(args.out / "loss.png", points)


def main() -> None:
    """Build, train, save, and show what the model writes."""
    args = parse_arguments()
    mpispeed.init_distributed()
    text, held_out_text = standard_library(args.cap_bytes)
    training, held_out = Windows(text, args.block), Windows(held_out_text, args.block)
    check(args, training, held_out)
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = GPT(Shape(args.layers, args.heads, args.width, args.block, args.dropout))
    engine, _, _, _ = mpispeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=training
    )
    Console(args.steps, tokens_per_sample=args.block, steps_per_print=20).attach(engine.bus)

    rank, size = comm.get_rank(), comm.get_world_size()
    stride = max(1, len(held_out) // VALIDATION_WINDOWS)
    own = range(0, len(held_out), stride)[:VALIDATION_WINDOWS][rank::size]
    if rank == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{count:,} parameters, {len(text):,} bytes of text, {size} ranks", flush=True)
    if args.resume:
        resume(engine, args.save_dir)
    train(engine, args, DataLoader(Subset(held_out, own), batch_size=24))
    engine.save_checkpoint(str(args.save_dir), overwrite=True)
    if args.sample:
        with mpispeed.zero.unwrap_model_for_generation(engine):  # parameters may be cut over the ranks
            if rank == 0:
                written = model.generate(b"def ", args.sample).decode("utf-8", errors="replace")
                print(f"--- what it writes after {engine.global_steps} steps ---\n{written}\n---", flush=True)
    comm.barrier()
    engine.destroy()


if __name__ == "__main__":
    main()
