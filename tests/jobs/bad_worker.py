"""Jobs that go wrong: argv[1] says how."""

import sys

import torch

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config


def main(how: str) -> None:
    settings = config(1, 12, 1, **WARM)
    if how == "unknown_key":
        settings["zero_optimisation"] = {"stage": 1}
    if how == "batch":
        settings.update(train_batch_size=7, gradient_accumulation_steps=2)
    if how == "ranks":
        settings["data_parallel_size"] = 64
    if how == "missing":
        settings = "no/such/ds_config.json"
    if how == "differs":
        settings["gradient_clipping"] = 1.0 + mpispeed.init_distributed().rank
    engine, *_ = mpispeed.initialize(model=TinyLM(), config=settings)
    if how == "raise" and engine.global_rank == engine.world_size - 1:
        raise ZeroDivisionError("planted")
    if how == "raise_all":
        raise ZeroDivisionError("planted")
    if how == "exit" and engine.global_rank == engine.world_size - 1:
        sys.exit(3)
    data = batches(1, 12)[0]
    loss = engine(data[: engine.train_micro_batch_size_per_gpu()])
    engine.backward(loss)
    engine.step()
    torch.manual_seed(0)


if __name__ == "__main__":
    main(sys.argv[1])
