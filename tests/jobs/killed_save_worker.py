"""Saves known state again and again until it is killed; argv: folder, first number, how many saves, kind.

The kinds: "new" tags, tags that are saved again ("overwrite"), and new tags where every rank is a node with a folder of
its own ("nodes").

Content, name and way of writing of a checkpoint follow from its number alone. Rank 0 says when each save begins and
ends and how long it took; other ranks say which process they are.
"""

import os
import sys
import time
from pathlib import Path

import torch

from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import SaveOptions, save

PARAMS = 6
ROWS, COLUMNS = 701, 700
SLOTS = ("master", "exp_avg")
NAMES = 2
"""With overwriting: so many tags take turns."""


def value_of(number: int, param: int, slot: str) -> torch.Tensor:
    """A tensor of checkpoint `number`, about 2 MB; no two are equal anywhere."""
    base = (number * PARAMS + param) * len(SLOTS) + SLOTS.index(slot)
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + base * 1000.5


def tag_of(number: int, is_over: bool) -> str:
    """Its name."""
    return f"over{number % NAMES}" if is_over else f"step{number}"


def folder_of(folder: Path, rank: int, kind: str) -> Path:
    """Where a rank saves."""
    return folder / f"node{rank}" if kind == "nodes" else folder


def options_of(number: int, kind: str) -> SaveOptions:
    """All four ways of writing, in turn."""
    writing = "direct" if number % 2 else "aggregated"
    files = 3 if number // 2 % 2 else 1
    is_over, is_local = kind == "overwrite", kind == "nodes"
    return SaveOptions(
        writing=writing, files=files, overwrite=is_over, window_bytes=4 << 20, verify="none", node_local=is_local
    )


def pieces_of(number: int, rank: int, size: int) -> list[LogicalTensor]:
    """This rank's cut of every tensor."""
    made = []
    for param in range(PARAMS):
        for slot in SLOTS:
            flat = value_of(number, param, slot).reshape(-1)
            step = -(-flat.numel() // size)
            start, stop = min(rank * step, flat.numel()), min((rank + 1) * step, flat.numel())
            own = [Piece(start, flat[start:stop])]
            made.append(LogicalTensor(f"layer{param}.weight", slot, (ROWS, COLUMNS), torch.float32, own))
    return made


def say(text: str) -> None:
    """At once, in one piece."""
    os.write(1, (text + "\n").encode())


def main(folder: Path, first: int, count: int, kind: str) -> None:
    """Save `count` times."""
    from mpispeed.mesh import start

    comm = start().comm
    params = [ParamInfo(f"layer{param}.weight", (ROWS, COLUMNS)) for param in range(PARAMS)]
    say(f"process {comm.rank} {os.getpid()}")
    comm.barrier()
    for number in range(first, first + count):
        began = time.monotonic()
        pieces = pieces_of(number, comm.rank, comm.size)
        if comm.rank == 0:
            say(f"begin {number}")
        save(
            comm,
            folder_of(folder, comm.rank, kind),
            tag_of(number, kind == "overwrite"),
            params=params,
            tensors=pieces,
            state={"engine": {"global_steps": number}, "client": {"number": number}},
            rng={"cpu": bytes([number % 256, comm.rank])},
            options=options_of(number, kind),
        )
        if comm.rank == 0:
            say(f"end {number} {time.monotonic() - began:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
