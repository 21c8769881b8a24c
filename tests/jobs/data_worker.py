"""A run whose data are copied to a disk and read by worker processes; its rank 0, or a worker of it, may be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mpispeed
from tests.zoo.models import TinyLM, batches
from tests.zoo.training import WARM, config


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences of tokens in a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY)
        self.width = batches(1, 1)[0].shape[1]

    def __len__(self) -> int:
        return os.fstat(self.file).st_size // (8 * self.width)

    def read_batch(self, indices: Sequence[int]) -> torch.Tensor:
        """Sequences of one batch."""
        rows = [os.pread(self.file, 8 * self.width, 8 * self.width * index) for index in indices]
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.int64).view(len(indices), self.width)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read_batch([index])[0]

    def files(self) -> list[str]:
        """What is read."""
        return [self.path]

    def reopened(self, paths: Mapping[str, str]) -> Tokens:
        """The same over a copy."""
        return Tokens(paths[self.path])


def main(folder: Path, ending: str) -> None:
    """Train; `ending`: "whole", or what is killed in the second step."""
    source = folder / "tokens.bin"
    if not source.exists():
        part = folder / f"part-{os.getpid()}"
        part.write_bytes(batches(1, 360)[0].numpy().tobytes())
        part.rename(source)
    reading: dict[str, Any] = {"workers": 4, "prefetch": 8, "copy_to": str(folder / "disk")}
    settings = config(1, 12, 1, **WARM, data_loader=reading)
    engine, _, loader, _ = mpispeed.initialize(model=TinyLM(), config=settings, training_data=Tokens(str(source)))
    workers: set[int] = set()
    for step, tokens in enumerate(loader):
        workers |= {child.pid or 0 for child in multiprocessing.active_children()}
        if step == 1:
            (folder / f"pids-{engine.global_rank}").write_text(" ".join(map(str, (os.getpid(), *workers))))
            engine.mesh["data"].barrier()
        if step == 1 and engine.global_rank == 0 and ending == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and engine.global_rank == 0 and ending == "worker":
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
