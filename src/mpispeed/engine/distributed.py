"""`init_distributed`: start MPI; arguments of torch and DeepSpeed that do not apply are named in warnings."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.errors import ConfigError
from mpispeed.base.ports import free_port
from mpispeed.logs import rank_logs
from mpispeed.mesh import exits
from mpispeed.mesh.world import DEFAULT_TIMEOUT_SECONDS, is_started, start
from mpispeed.watchdog import start as watchdog

if TYPE_CHECKING:
    from mpispeed.mesh.world import World

log = logging.getLogger(__name__)

DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(seconds=DEFAULT_TIMEOUT_SECONDS)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta | float | None = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> World:
    """Start MPI, and make torch.distributed's default process group over it, once per process.

    A group of all ranks that other code has made before is adopted.

    Args:
        dist_backend: "mpi"; others are named in a warning, and MPI is used.
        auto_mpi_discovery: no effect: rank and size are always those of MPI.
        distributed_port: one other than 29500 is exported as MASTER_PORT, with MASTER_ADDR; rank 0 decides.
        verbose: no effect.
        timeout: how long a started operation waits for its peers, in seconds or as a timedelta. A given one longer than
            `guard.hang_timeout` also holds for ranks that wait for a rank that is in no operation.
        init_method: "env://" exports MASTER_ADDR and MASTER_PORT for other code that needs a rendezvous, with a port
            chosen for this job; others are named in a warning. Variables that are set already stay.
        dist_init_required: no effect.
        config: no effect.
        rank: has to be that of MPI if it is given.
        world_size: likewise.

    Collective over: all ranks of the job, at the first call and where MASTER_ADDR and MASTER_PORT are asked for.

    Raises:
        ConfigError: `rank`, `world_size` or `timeout` do not fit; at the first call on every rank.
    """
    is_first, seconds = not is_started(), _seconds(timeout)
    seconds_given = seconds if seconds > 0 else DEFAULT_TIMEOUT_SECONDS
    world = join_world(seconds_given)
    with world.comm.together(ConfigError) if is_first else contextlib.nullcontext():
        _check_arguments(world, rank, world_size, timeout)
    if timeout is not None and timeout is not DEFAULT_TIMEOUT:
        watchdog.allow(hang_seconds=seconds)
    if world.rank == 0:
        _name_unused(dist_backend, init_method)
    is_asked = init_method == "env://" or distributed_port != DEFAULT_PORT
    place: dict[str, str] = {}
    if is_first or is_asked:
        place = world.comm.share(_meeting_place(world, distributed_port) if is_asked and world.rank == 0 else {})
    for name, value in place.items():
        os.environ.setdefault(name, value)
    if torch.distributed.is_available() and (is_first or not torch.distributed.is_initialized()):
        _make_torch_group(world, seconds_given)
    return world


def join_world(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> World:
    """Start MPI, logs and the watchdog, once per process. Collective over: all ranks, at the first call."""
    world = start(timeout=timeout_seconds)
    rank_logs.begin(world.rank)
    exits.keep_silent_errors(rank_logs.note)
    logs.setup(world.rank, world.size)
    watchdog.watch_over(world)
    return world


def _make_torch_group(world: World, timeout_seconds: float) -> None:
    from mpispeed.process_group import registration  # torch is built without torch.distributed on some systems

    registration.register(join_world)
    if world.has_threads:
        registration.make_default(world, timeout_seconds)
    elif world.rank == 0:
        log.warning(
            "torch.distributed has no process group: its store and started verbs need MPI_THREAD_MULTIPLE, which this "
            "MPI library does not grant"
        )


def _seconds(timeout: timedelta | float | None) -> float:
    """Seconds of a timeout; 0 for a value that is not a time."""
    if timeout is None:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    except (TypeError, ValueError):
        return 0.0


def _check_arguments(world: World, rank: int, world_size: int, timeout: object) -> None:
    """Refuse arguments that contradict MPI or are invalid.

    Raises:
        ConfigError: there is one.
    """
    for name, given, found in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if given not in (None, -1, found):
            msg = (
                f"init_distributed({name}={given!r}): MPI says {found}, and its numbers count; leave the argument out, "
                "or take it from the launcher that starts this job"
            )
            raise ConfigError(msg)
    if not _seconds(timeout) > 0:  # type: ignore[arg-type]
        msg = f"init_distributed(timeout={timeout!r}): give a datetime.timedelta or seconds, above 0"
        raise ConfigError(msg)


def _name_unused(dist_backend: str | None, init_method: str | None) -> None:
    wanted = (("dist_backend", dist_backend, ("mpi", "mpi4py")), ("init_method", init_method, ("env://",)))
    for name, given, own in wanted:
        if given is not None and str(given).lower() not in own:
            log.warning("init_distributed(%s=%r) has no effect: ranks are connected by MPI; leave it out", name, given)


def _meeting_place(world: World, distributed_port: int) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT, called on rank 0."""
    host = "127.0.0.1" if world.node_count == 1 else socket.gethostname()
    port = distributed_port if distributed_port != DEFAULT_PORT else free_port(os.environ)
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
