"""A small run for drills: goes on from its last checkpoint, trains to step 6, saves after every second step."""

import sys

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config

TRAIN_BATCH = 12


def main(folder: str, stage: int, steps: int = 6) -> None:
    """`folder` takes checkpoints."""
    engine, *_ = mpispeed.initialize(model=TinyLM(), config=config(stage, TRAIN_BATCH, 1, **WARM))
    engine.load_checkpoint(folder)
    rank, share = engine.mesh.index("data"), TRAIN_BATCH // engine.mesh["data"].size
    everything = batches(steps, TRAIN_BATCH)
    while engine.global_steps < steps:
        loss = engine(everything[engine.global_steps][rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint(folder, overwrite=True)
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
