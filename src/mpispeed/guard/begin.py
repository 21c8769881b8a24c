"""Opens the ledgers of all ranks and starts a watcher on every node."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Bus, Event
from mpispeed.base.units import parse_duration
from mpispeed.guard.bench import Settings
from mpispeed.guard.sentinel import Sentinel
from mpispeed.guard.side import Node, open_listener, own_addresses
from mpispeed.guard.view import remove_ledgers
from mpispeed.mesh import ledger as ledgers
from mpispeed.mesh.world import World

log = logging.getLogger(__name__)

WATCH_SECONDS = 30.0
"""By when a hang that is proven is named."""

HANG_SECONDS = 600.0
"""After how long a rank that others wait for, and that is in no operation, ends the job."""

_SHARED_MEMORY = Path("/dev/shm")
_STARTED: list[object] = []


def watch_over(world: World) -> None:
    """Record what every rank does, and let a process beside the ranks of each node watch it.

    Nothing is done for one rank alone, the second time, or with MPISPEED_WATCH=0. MPISPEED_WATCH_SECONDS and
    MPISPEED_HANG_TIMEOUT set the limits. Reports go to MPISPEED_RUN_DIR, or to a folder that is made in the working
    folder when there is something to report.

    Collective over: all ranks of the job.

    Raises:
        ConfigError: on every rank: a limit is no positive number of seconds.
    """
    if world.size == 1 or _STARTED or world.comm.channel is None:
        return
    _STARTED.append("tried")
    limits, problem = (WATCH_SECONDS, HANG_SECONDS), ""
    try:
        limits = _seconds("MPISPEED_WATCH_SECONDS", WATCH_SECONDS), _seconds("MPISPEED_HANG_TIMEOUT", HANG_SECONDS)
    except ConfigError as error:
        problem = str(error)
    told = world.comm.library_gather_objects((problem, os.environ.get("MPISPEED_WATCH", "1"), limits))
    problems = [text for text, _, _ in told if text]
    if problems:
        raise ConfigError(problems[0])
    if any(switch == "0" for _, switch, _ in told):
        return
    limits = told[0][2]
    folder = _open_ledgers(world)
    if folder is None:
        return
    ledger = ledgers.current()
    if ledger is not None:
        sentinel = Sentinel(ledger, world.ending.abort)
        _STARTED.append(sentinel)
        sentinel.start()
    _start_watchers(world, folder, limits)


def attach(bus: Bus, watch_seconds: float, hang_seconds: float) -> None:
    """Use these limits, but those of the environment where it has some; note how far training is. Not collective."""
    ledger = ledgers.current()
    if ledger is not None:
        allow(watch_seconds=watch_seconds, hang_seconds=hang_seconds)
        bus.subscribe(Event.STEP_END, lambda event: ledger.steps(event["global_step"]))


def allow(*, watch_seconds: float = 0.0, hang_seconds: float = 0.0) -> None:
    """Give ranks at least so much time, as others of this process may have asked for more. Not collective."""
    ledger = ledgers.current()
    for field, variable, seconds in (
        ("watch_seconds", "MPISPEED_WATCH_SECONDS", watch_seconds),
        ("hang_seconds", "MPISPEED_HANG_TIMEOUT", hang_seconds),
    ):
        if ledger is not None and seconds > 0:
            ledger.header[field] = _seconds(variable, max(seconds, float(ledger.header[field][0])))


def _seconds(name: str, default: float) -> float:
    """Seconds in a variable of the environment."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        seconds = parse_duration(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        msg = f"{name} is {text!r} in the environment; set it to seconds, such as 600, or to a time such as 10m"
        raise ConfigError(msg)
    return seconds


def _open_ledgers(world: World) -> Path | None:
    """A ledger for each rank, or for none. Collective over: all ranks."""
    path, problem = "", ""
    if world.local_rank == 0:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        try:
            path = tempfile.mkdtemp(prefix="mpispeed-ledger-", dir=parent)
        except OSError as error:
            problem = str(error)
    path = world.node.library_share(path, 0)
    if path:
        try:
            ledgers.open_ledger(Path(path) / f"rank-{world.rank}", world.rank, world.size, world.local_rank)
        except OSError as error:
            problem = str(error)
    if len(set(world.node.library_gather_objects(_pid_namespace()))) > 1:
        problem = "ranks of one node do not see each other's processes: containers with process numbers of their own"
    problems = [text for text in world.comm.library_gather_objects(problem) if text]
    if problems:
        ledgers.close_ledger()
        if path and world.local_rank == 0:
            remove_ledgers(Path(path))
        if world.rank == 0:
            log.warning("nobody watches for hangs: %d ranks have no ledger (%s)", len(problems), problems[0])
        return None
    return Path(path)


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_watchers(world: World, folder: Path, limits: tuple[float, float]) -> None:
    """One process per node. Collective over: all ranks."""
    is_leader, listener, own = world.local_rank == 0, None, None
    if is_leader:
        addresses: tuple[str, ...] = ()
        if world.node_count > 1:
            with contextlib.suppress(OSError):
                listener, addresses = open_listener(), own_addresses()
        port = listener.getsockname()[1] if listener is not None else 0
        own = Node(socket.gethostname(), addresses, port, tuple(world.node.ranks))
    nodes = [node for node in world.comm.library_gather_objects(own) if node is not None]
    secret, report_folder = world.comm.library_share((secrets.token_hex(32), _report_folder()), 0)
    problem, pids = "", world.node.library_gather_objects(os.getpid())
    if is_leader:
        handles = _handles(dict(zip(world.node.ranks, pids, strict=True)))
        settings = Settings(nodes.index(own), tuple(nodes), secret, report_folder, *limits, handles=handles)
        try:
            settings.write(folder / "settings.json")
            _spawn(folder, listener, list(handles.values()))
        except OSError as error:
            problem = f"{socket.gethostname()}: {error}"
            remove_ledgers(folder)
    problems = [text for text in world.comm.library_gather_objects(problem) if text]
    if problems and world.rank == 0:
        log.warning("%d nodes have no watcher, hangs there are not seen (%s)", len(problems), problems[0])


_BOOT = """
import os, runpy
if os.fork():
    os._exit(0)
runpy.run_module("mpispeed.guard.watcher", run_name="__main__", alter_sys=True)
"""


def _handles(pids: Mapping[int, int]) -> dict[str, int]:
    """Handles of the ranks' processes: with them the kernel tells how a rank ended that died before the watcher ran."""
    found = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, AttributeError):
            found[str(rank)] = os.pidfd_open(pid)
    return found


def _spawn(folder: Path, listener: socket.socket | None, handles: Sequence[int]) -> None:
    """Start the watcher of this node, which outlives this process; the descriptors go to it."""
    words = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", _BOOT, str(folder)]
    passed = list(handles)
    if listener is not None:
        passed.append(listener.fileno())
        words.append(str(listener.fileno()))
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    watcher = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed,
        start_new_session=True,
    )  # fmt: skip
    watcher.wait()  # the watcher itself is a grandchild: programs that wait for all of their children do not see it
    for handle in handles:
        os.close(handle)
    if listener is not None:
        listener.close()


def _report_folder() -> str:
    given = os.environ.get("MPISPEED_RUN_DIR")
    if given:
        return str(Path(given).absolute())
    name = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    return str(Path.cwd() / f"mpispeed-report-{name}")
