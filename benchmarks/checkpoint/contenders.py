"""Saves of the same number of bytes by several writers, in turns; a job of `compare.py`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import state
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard

from mpispeed.native.block_io import BlockFile, BlockIO, Options

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers

CHUNK = 4 << 20


class Bench:
    """One folder, one engine, and tensors of as many bytes as this rank saves, cut as a peer would have them."""

    def __init__(self, options: Any) -> None:
        self.folder = Path(options.folder)
        self.engine = state.make_engine(options)
        self.world = self.engine.mesh.world
        state.train(self.engine)
        count = options.width * options.width // self.world.size
        self.tensors = {
            f"layers.{layer}.weight.{slot}": torch.randn(count)
            for layer in range(options.layers)
            for slot in ("master", "exp_avg", "exp_avg_sq")
        }
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.copies = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        device_mesh = torch.distributed.init_device_mesh("cpu", (self.world.size,))
        self.cut = {n: DTensor.from_local(t, device_mesh, [Shard(0)]) for n, t in self.tensors.items()}
        self.step = 0
        self.files = 0

    def timed(self, function: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        self.world.comm.barrier()
        start = time.perf_counter()
        function()
        own = time.perf_counter() - start
        return max(self.world.comm.gather_objects(own))

    def own_file(self, suffix: str) -> Path:
        """A file of this rank in a folder of the contender."""
        return self.folder / f"{suffix}.{self.world.rank}"

    # -- contenders ----------------------------------------------------------------------------------------------

    def raw_direct(self) -> None:
        """Both halves into one file whose space is reserved, past the page cache, four blocks at a time."""
        path = self.folder / "raw"
        if self.world.rank == 0:
            with BlockFile(path, create=True) as file:
                file.allocate(self.bytes * self.world.size)
        self.world.comm.barrier()
        offset = self.world.rank * self.bytes
        with BlockFile(path, direct=True) as file, BlockIO(Options(queue_depth=4)) as io:
            under_way: list[Any] = []
            for tensor in self.tensors.values():
                for part in tensor.view(torch.uint8).split(CHUNK):
                    under_way.append(io.write(file, part, offset))
                    offset += part.numel()
                    if len(under_way) == 4:
                        under_way.pop(0).wait()
            for transfer in under_way:
                transfer.wait()
            os.fsync(file.descriptors(has_odd_bytes=False)[0])
        self.world.comm.barrier()

    def raw(self) -> None:
        """Both halves into one file whose space is reserved, through the page cache."""
        path = self.folder / "raw"
        if self.world.rank == 0:
            with BlockFile(path, create=True) as file:
                file.allocate(self.bytes * self.world.size)
        self.world.comm.barrier()
        handle = os.open(path, os.O_WRONLY)
        offset = self.world.rank * self.bytes
        for tensor in self.tensors.values():
            data = tensor.numpy().data.cast("B")
            for first in range(0, len(data), CHUNK):
                part = data[first : first + CHUNK]
                os.pwrite(handle, part, offset)
                offset += len(part)
        os.fsync(handle)
        os.close(handle)
        self.world.comm.barrier()

    def copy(self) -> None:
        """Once through memory."""
        for name, tensor in self.tensors.items():
            self.copies[name].copy_(tensor)

    def mpispeed(self) -> None:
        """As users call it."""
        self.engine.save_checkpoint(str(self.folder / "ours"), tag=f"s{self.step}")

    def torch_save(self) -> None:
        """A file per rank."""
        with self.own_file("torch").open("wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())
        self.world.comm.barrier()

    def safetensors(self) -> None:
        """A file per rank."""
        from safetensors.torch import save_file

        path = self.own_file("safetensors")
        save_file(self.tensors, path)
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        self.world.comm.barrier()

    def dcp(self) -> None:
        """A file per rank and the metadata; it brings files to the disk by itself."""
        writer = dcp.FileSystemWriter(self.folder / f"dcp{self.step}", sync_files=True)
        dcp.save(self.cut, storage_writer=writer)

    def ours_async(self) -> tuple[float, float]:
        """(stall, whole) of a save in the background."""
        start = time.perf_counter()
        stall = self.timed(
            lambda: self.engine.save_checkpoint(str(self.folder / "back"), tag=f"s{self.step}", async_save=True)
        )
        self.engine.wait_checkpoint()
        return stall, time.perf_counter() - start

    def dcp_async(self) -> tuple[float, float]:
        """(stall, whole) of a save in the background."""
        start = time.perf_counter()
        writer = dcp.FileSystemWriter(self.folder / f"dcp-async{self.step}", sync_files=True)
        held: list[Any] = []
        stall = self.timed(lambda: held.append(dcp.async_save(self.cut, storage_writer=writer)))
        held[0].result()
        return stall, time.perf_counter() - start

    def clean(self) -> None:
        """Remove what a contender wrote; the last checkpoint of ours stays for loading."""
        self.world.comm.barrier()
        if self.world.rank == 0:
            for path in self.folder.iterdir():
                if path.name == "ours":
                    tags = [tag for tag in path.iterdir() if tag.is_dir() and tag.name != f"s{self.step}"]
                    last = path / f"s{self.step}"
                    self.files = len(list(last.rglob("*.*"))) if last.is_dir() else self.files
                    for tag in tags:
                        shutil.rmtree(tag)
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            os.sync()
        self.world.comm.barrier()


def main() -> None:
    """All contenders in turns, as many rounds as asked for; the first round only warms up."""
    parser = state.parser(__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    peers.join_gloo()
    bench = Bench(options)
    writers = {
        "raw, page cache": bench.raw,
        "raw, O_DIRECT": bench.raw_direct,
        "copy": bench.copy,
        "mpispeed": bench.mpispeed,
        "torch.save": bench.torch_save,
        "safetensors": bench.safetensors,
        "torch DCP": bench.dcp,
    }
    behind = {"mpispeed, async": bench.ours_async, "torch DCP, async": bench.dcp_async}
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    stalls: dict[str, list[float]] = {name: [] for name in behind}
    for round_number in range(options.rounds + 1):
        bench.step = round_number
        turn = list(writers.items())
        for name, write in turn[round_number % len(turn) :] + turn[: round_number % len(turn)]:
            taken = bench.timed(write)
            bench.clean()
            if round_number:
                seconds[name].append(taken)
        for name, save in behind.items():
            stalls[name].append(max(bench.world.comm.gather_objects(save()[0])))
            bench.clean()
    if bench.world.rank == 0:
        figures = {
            "bytes": bench.bytes * bench.world.size, "files": bench.files, "seconds": seconds, "stalls": stalls,
        }  # fmt: skip
        Path(options.output).write_text(json.dumps(figures))
    bench.engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
