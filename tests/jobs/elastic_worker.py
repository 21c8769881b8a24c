"""A job that goes on from its last checkpoint; at step PAUSE of the first start its last rank waits to die."""

import json
import os
import socket
import sys
import time
from pathlib import Path

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, train_averaged

TRAIN_BATCH = 12
SAVE_EVERY = 2
WAIT_SECONDS = 60


def main(folder: Path, steps: int, pause: int = -1) -> None:
    """Train up to `steps` steps; each is a line of log.jsonl."""
    engine = mpispeed.initialize(model=TinyLM(), config=config(1, TRAIN_BATCH, 1, **WARM))[0]
    engine.load_checkpoint(str(folder))
    restarts = int(os.environ.get("MPISPEED_RESTART_COUNT", "0"))
    hosts = engine.mesh["data"].gather_objects(socket.gethostname())
    data = batches(steps, TRAIN_BATCH)
    for step in range(engine.global_steps, steps):
        if step == pause and restarts == 0 and engine.global_rank == engine.world_size - 1:
            (folder / "victim").write_text(str(os.getpid()))
            time.sleep(WAIT_SECONDS)
        (loss,) = train_averaged(engine, [data[step]])
        if engine.global_rank == 0:
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": loss, "hosts": hosts, "restarts": restarts}) + "\n")
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            engine.save_checkpoint(str(folder))
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
