"""Builds a token store of some sources of the standard library, and trains a small GPT on it, on any number of ranks.

mpispeed run -n 2 docs/examples/train_tokens.py --steps 50
mpispeed run -n 3 docs/examples/train_tokens.py --steps 100     # goes on with the same samples in the same order
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

from gpt import GPT, Shape

import mpispeed
from mpispeed import comm, token_stores

SHAPE = Shape(layers=2, heads=4, width=64, block=64)
CONFIG = {"train_batch_size": 24, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
SOURCES = sorted(Path(sysconfig.get_paths()["stdlib"], "asyncio").glob("*.py"))
NEWLINE = "10"  # ends a document, so that every token is a byte


def main() -> None:
    """Build or open the store, train, and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("train_tokens"), help="folder of the store and checkpoints")
    given = parser.parse_args()
    mpispeed.init_distributed()
    path = given.out / "sources.h5"
    if not path.exists():
        # As `mpispeed data build -o sources.h5 -t byte --eos 10 --documents file --format text --skip-bad FILES`.
        report = token_stores.build_store(
            path, SOURCES, "byte", eos=NEWLINE, documents="file", format="text", skip_bad=True
        )
        if comm.get_rank() == 0:
            print(f"{report.tokens} tokens of {report.documents} documents")
    data = token_stores.TokenWindows(token_stores.open_on_node(path), SHAPE.block)
    engine, _, loader, _ = mpispeed.initialize(model=GPT(SHAPE), training_data=data, config=CONFIG)
    engine.load_checkpoint(given.out / "checkpoints")
    batches = iter(mpispeed.RepeatingLoader(loader))
    for step in range(engine.global_steps + 1, given.steps + 1):
        batch = next(batches)
        loss = engine(batch["input_ids"], batch["labels"])
        engine.backward(loss)
        engine.step()
        if step % 10 == 0 and comm.get_rank() == 0:
            print(f"step {step} loss {loss.item():.3f}")
    engine.save_checkpoint(given.out / "checkpoints")


if __name__ == "__main__":
    main()
