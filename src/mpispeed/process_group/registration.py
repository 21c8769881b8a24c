"""The backend "mpi4py" of torch.distributed: registration, making groups, and the default group of a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from mpispeed.base.errors import ConfigError
from mpispeed.base.launched import is_child_of_rank, launched_size
from mpispeed.mesh.world import World, current
from mpispeed.process_group.device_group import MixedProcessGroup
from mpispeed.process_group.group import BACKEND, MpiProcessGroup
from mpispeed.process_group.options import Options
from mpispeed.process_group.store import MpiStore

DEVICES = ["cpu", "cuda"]
"""Devices whose tensors the verbs take. Torch makes this backend the default one of a device that has no other yet."""

_STATE: dict[str, Any] = {}
"""What joins MPI where nothing has yet, the job's store, and the options of the default group."""


def register(join: Callable[[], World]) -> None:
    """Make the backend known to torch; `join` starts MPI for a script that begins with init_process_group.

    `init_method="env://"`, torch's default, is served over MPI from now on, without an address or a port: in ranks of
    MPI that ask for as many ranks as there are. Processes of torchrun or of torch.multiprocessing keep torch's own.
    """
    _STATE["join"] = join
    _STATE.setdefault("pid", os.getpid())
    if hasattr(dist.Backend, BACKEND.upper()):
        return
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)
    register_rendezvous_handler(BACKEND, _meet)
    plain = _rendezvous_handlers["env"]

    def env(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
        chosen = _meet if is_ours(url) else plain
        yield from chosen(url, *args, **kwargs)

    _rendezvous_handlers["env"] = env  # the only way: a scheme can be registered once


def is_ours(url: str) -> bool:
    """True if processes that meet at `env://` are the ranks of MPI: not those of another launcher, nor their children.

    Without an address, or without being told their ranks, torch's own cannot work, so there it is ours.
    """
    world = current()
    name, size = launched_size(os.environ)
    size = size if world is None else world.size
    if os.getpid() != _STATE["pid"] or name == "WORLD_SIZE":
        return False
    asked = _asked(url, "world_size")
    is_told = asked != -1 or all(os.environ.get(each) for each in ("RANK", "WORLD_SIZE"))
    if not (os.environ.get("MASTER_ADDR") and is_told):
        return True
    return size > 1 and asked in (-1, size) and not is_child_of_rank()


def _asked(url: str, name: str) -> int:
    """A number that init_process_group was given; -1 if it was not."""
    return int(parse_qs(urlsplit(url).query).get(name, ["-1"])[0])


def make_default(world: World, timeout_seconds: float) -> None:
    """Make a process group of all ranks the default one of torch, or adopt the one that is there.

    Collective over: all ranks.

    Raises:
        ConfigError: the group that is there does not have the ranks of MPI.
    """
    with world.comm.together(ConfigError):
        if dist.is_initialized():
            _check_adopted(world)
    if not dist.is_initialized():
        store, seconds = _fresh_store(world), timedelta(seconds=timeout_seconds)
        hook = sys.excepthook
        dist.init_process_group(BACKEND, store=store, rank=world.rank, world_size=world.size, timeout=seconds)
        sys.excepthook = hook  # torch's one puts "[rank 0]" before lines of which one rank alone writes all


def _check_adopted(world: World) -> None:
    found = dist.get_rank(), dist.get_world_size()
    if found != (world.rank, world.size):
        msg = (
            f"torch.distributed was initialised before as rank {found[0]} of {found[1]} (backend "
            f"{dist.get_backend()!r}), and MPI says rank {world.rank} of {world.size}; call "
            "mpispeed.init_distributed() before anything that initialises torch.distributed, or start the script with "
            "`mpispeed run --torch-env`, which tells such code its ranks"
        )
        raise ConfigError(msg)


def _world() -> World:
    found = current()
    if found is None:
        join: Callable[[], World] = _STATE["join"]
        found = join()
    return found


def _fresh_store(world: World) -> dist.Store:
    """An empty part of the job's store, which is made at the first call. Collective over: all ranks."""
    if _STATE.get("world") is not world:
        store = MpiStore(world.comm, has_threads=world.has_threads)
        _STATE.update(world=world, store=store, meetings=0)
    _STATE["meetings"] += 1
    return dist.PrefixStore(f"meeting {_STATE['meetings']}", _STATE["store"])


def _meet(url: str, *_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """A rendezvous over MPI. Collective over: all ranks.

    Raises:
        ConfigError: another rank or number of ranks was asked for.
    """
    world = _world()
    for name, found in (("rank", world.rank), ("world_size", world.size)):
        if _asked(url, name) not in (-1, found):
            msg = (
                f"init_process_group({name}={_asked(url, name)}): MPI says {found}; leave the argument out, or set "
                "MASTER_ADDR and MASTER_PORT for processes that MPI has not started"
            )
            raise ConfigError(msg)
    yield _fresh_store(world), world.rank, world.size


def _create(given: Any, options: Any = None) -> MpiProcessGroup:
    """A process group, as torch asks for it. Collective over: its members.

    Raises:
        ConfigError: rank and size are not those of MPI, or `pg_options` are those of another backend.
    """
    world = _world()
    ranks = list(given.global_ranks_in_group) or list(range(world.size))
    if not given.global_ranks_in_group and (given.group_rank, given.group_size) != (world.rank, world.size):
        msg = (
            f"init_process_group({BACKEND!r}) was told rank {given.group_rank} of {given.group_size}, and MPI says "
            f"rank {world.rank} of {world.size}; leave rank and world_size out, and start the job with srun or mpirun"
        )
        raise ConfigError(msg)
    if options is not None and not isinstance(options, Options):
        msg = f"pg_options of backend {BACKEND!r} are mpispeed.torch_backend.Options, not {type(options).__name__}"
        raise ConfigError(msg)
    chosen = options or (_STATE.get("options") if given.global_ranks_in_group else None) or Options()
    if not given.global_ranks_in_group:
        _STATE["options"] = chosen
    comm = world.group_of_members(ranks, f"torch {given.group_id}", chosen.reduction)
    kind = MixedProcessGroup if chosen.device else MpiProcessGroup
    group = kind(world, comm, given.store, chosen)
    group.set_timeout(given.timeout)
    return group
