"""One job of the restart test: continue, train some steps with the engine's own loader, save."""

import json
import sys
from pathlib import Path

import torch

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config, zero_section

TRAIN_BATCH = 12
BATCH_KEYS = ("train_batch_size", "gradient_accumulation_steps")


class Numbered(torch.utils.data.Dataset):
    """Samples that carry their own index."""

    def __init__(self) -> None:
        self.tokens = batches(1, 60)[0]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.tokens[index]


def main(folder: Path, steps: int, stage: int, disk: str = "", elasticity: str = "{}", data_loader: str = "{}") -> None:
    """With `disk`, what can rest in swap files does, below that folder; the last two are these sections, as JSON."""
    settings = config(stage, TRAIN_BATCH, 1, **WARM, data_loader=json.loads(data_loader))
    if json.loads(elasticity):
        settings = {key: value for key, value in settings.items() if key not in BATCH_KEYS}
        settings["elasticity"] = json.loads(elasticity)
    if disk:
        files = {"device": "nvme", "nvme_path": disk}
        sections = {"offload_optimizer": files, "offload_param": {**files, "max_in_cpu": 0}}
        settings["zero_optimization"] = zero_section(stage, **sections)
    engine, _, loader, _ = mpispeed.initialize(model=TinyLM(), config=settings, training_data=Numbered())
    engine.load_checkpoint(str(folder))
    losses, order = [], []
    stream = iter(mpispeed.RepeatingLoader(loader))
    comm = engine.mesh["data"]
    for _ in range(steps):
        indices, tokens = next(stream)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        total = loss.detach().double() / comm.size
        comm.all_reduce(total)
        losses.append(float(total))
        order += [index for part in comm.gather_objects(indices.tolist()) for index in part]
    engine.save_checkpoint(str(folder))
    if engine.global_rank == 0:
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"ranks": comm.size, "losses": losses, "order": order}) + "\n")
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
