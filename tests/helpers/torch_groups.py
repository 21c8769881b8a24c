"""Default groups of torch.distributed for tests: ours, and gloo's to compare with."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mpispeed.torch_backend  # noqa: F401  registers the backend
from mpispeed.mesh.world import World

Found = dict[str, torch.Tensor]


@contextmanager
def default_group(world: World, backend: str, **settings: Any) -> Iterator[None]:
    """A default group of all ranks on `backend`. Collective over: all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = world.comm.share(str(Path(folder, "store")))
        store = dist.FileStore(path, world.size)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, **settings)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()
            world.comm.barrier()


def run_all(world: World, backend: str, clients: dict[str, Callable[[], Found]]) -> dict[str, Found | Exception]:
    """What each client returns or raises with a default group of `backend`. Collective over: all ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with default_group(world, backend):
            return {name: _run(client) for name, client in clients.items()}
    finally:
        torch.set_num_threads(threads)


def _run(client: Callable[[], Found]) -> Found | Exception:
    try:
        return client()
    except Exception as error:
        return error


def check_same(ours: Found | Exception, theirs: Found | Exception, size: int, *, tolerance: float = 1e-5) -> None:
    """Fail unless two runs gave the same: bit by bit on up to two ranks, where sums have one order."""
    for found in (ours, theirs):
        if isinstance(found, Exception):
            raise found
    assert ours.keys() == theirs.keys()
    near = {"rtol": tolerance, "atol": tolerance} if size > 2 else {"rtol": 0.0, "atol": 0.0}
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], **near, msg=lambda text, at=name: f"{at}: {text}")


def check_bits(ours: dict[str, Found | Exception], again: dict[str, Found | Exception]) -> None:
    """Fail unless two runs of the same clients gave the same bits."""
    for client, found in again.items():
        check_same(found, ours[client], 1)
