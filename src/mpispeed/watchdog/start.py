"""Opens the recorders of all ranks and starts a watchdog on every node."""

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
from mpispeed.base.hang_limits import HANG_SECONDS, WATCH_SECONDS
from mpispeed.base.units import parse_duration
from mpispeed.mesh import recorder as recorders
from mpispeed.mesh.comm import Failures, agree_by_texts, together
from mpispeed.mesh.world import World
from mpispeed.watchdog import report as reports
from mpispeed.watchdog.node_ranks import Settings
from mpispeed.watchdog.recorder_reader import remove_recorders
from mpispeed.watchdog.sentinel import Sentinel
from mpispeed.watchdog.side_channel import Node, open_listener, own_addresses

log = logging.getLogger(__name__)

REPORTS = "mpispeed_reports"
"""Folder in the working folder for reports of runs without a folder of their own."""

_SHARED_MEMORY = Path("/dev/shm")
_STARTED: list[object] = []


def watch_over(world: World) -> None:
    """Record every rank's operations, and start a watchdog process on each node.

    Nothing is done for one rank alone, the second time, or with MPISPEED_WATCH=0. MPISPEED_WATCH_SECONDS and
    MPISPEED_HANG_TIMEOUT set the limits. Reports go to MPISPEED_RUN_DIR, or to a folder below mpispeed_reports in the
    working folder, which is made for hangs, and for deaths that no rank has explained.

    Collective over: all ranks of the job.

    Raises:
        ConfigError: on every rank: a limit is no positive number of seconds.
    """
    if world.size == 1 or _STARTED or world.comm.group.sequence is None:
        return
    _STARTED.append("tried")
    with together(agree_by_texts(world.comm.transport.library_gather_objects), ConfigError):
        limits = _seconds("MPISPEED_WATCH_SECONDS", WATCH_SECONDS), _seconds("MPISPEED_HANG_TIMEOUT", HANG_SECONDS)
    told = world.comm.transport.library_gather_objects((os.environ.get("MPISPEED_WATCH", "1"), limits))
    if any(switch == "0" for switch, _ in told):
        return
    limits = told[0][1]
    folder = _open_recorders(world)
    if folder is None:
        return
    recorder = recorders.current()
    if recorder is not None:
        sentinel = Sentinel(recorder, world.ending.abort)
        _STARTED.append(sentinel)
        sentinel.start()
    _start_watchdogs(world, folder, limits)


def attach(bus: Bus, watch_seconds: float, hang_seconds: float) -> None:
    """Set these limits, except those that the environment sets; note the progress of training. Not collective."""
    recorder = recorders.current()
    if recorder is not None:
        allow(watch_seconds=watch_seconds, hang_seconds=hang_seconds)
        bus.subscribe(Event.STEP_END, recorder.note_step)


def allow(*, watch_seconds: float = 0.0, hang_seconds: float = 0.0) -> None:
    """Raise the limits to at least these; others in this process may have asked for more. Not collective."""
    recorder = recorders.current()
    for field, variable, seconds in (
        ("watch_seconds", "MPISPEED_WATCH_SECONDS", watch_seconds),
        ("hang_seconds", "MPISPEED_HANG_TIMEOUT", hang_seconds),
    ):
        if recorder is not None and seconds > 0:
            recorder.header[field] = _seconds(variable, max(seconds, float(recorder.header[field][0])))


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


def _open_recorders(world: World) -> Path | None:
    """A recorder for each rank, or for none. Collective over: all ranks."""
    path, failures = "", Failures()
    if world.local_rank == 0:
        with failures.kept():
            parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
            path = tempfile.mkdtemp(prefix="mpispeed-ledger-", dir=parent)
    path = world.node.transport.library_share(path, 0)
    if path:
        with failures.kept():
            recorders.open_recorder(Path(path) / f"rank-{world.rank}", world.rank, world.size, world.local_rank)
    problem = failures.text(plain=OSError)
    if len(set(world.node.transport.library_gather_objects(_pid_namespace()))) > 1:
        problem = "ranks of one node do not see each other's processes: containers with process numbers of their own"
    problems = [text for text in world.comm.transport.library_gather_objects(problem) if text]
    if problems:
        recorders.close_recorder()
        if path and world.local_rank == 0:
            remove_recorders(Path(path))
        if world.rank == 0:
            log.warning("nobody watches for hangs: %d ranks have no flight recorder (%s)", len(problems), problems[0])
        return None
    return Path(path)


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_watchdogs(world: World, folder: Path, limits: tuple[float, float]) -> None:
    """One process per node. Collective over: all ranks."""
    is_leader, listener, own = world.local_rank == 0, None, None
    if is_leader:
        addresses: tuple[str, ...] = ()
        if world.node_count > 1:
            with contextlib.suppress(OSError):
                listener, addresses = open_listener(), own_addresses()
        port = listener.getsockname()[1] if listener is not None else 0
        own = Node(socket.gethostname(), addresses, port, tuple(world.node.ranks))
    nodes = [node for node in world.comm.transport.library_gather_objects(own) if node is not None]
    secret, (report_folder, is_run_folder) = world.comm.transport.library_share(
        (secrets.token_hex(32), _report_folder()), 0
    )
    failures, pids = Failures(), world.node.transport.library_gather_objects(os.getpid())
    if is_leader:
        with failures.kept():
            handles = _handles(dict(zip(world.node.ranks, pids, strict=True)))
            settings = Settings(
                nodes.index(own), tuple(nodes), secret, report_folder, *limits, is_run_folder, handles=handles
            )
            settings.write(folder / "settings.json")
            _spawn(folder, listener, list(handles.values()))
        if failures.first is not None:
            remove_recorders(folder)
    problem = failures.text(doing=socket.gethostname(), plain=OSError)
    problems = [text for text in world.comm.transport.library_gather_objects(problem) if text]
    if problems and world.rank == 0:
        log.warning("%d nodes have no watchdog, hangs there are not seen (%s)", len(problems), problems[0])


_BOOT = """
import os, runpy
if os.fork():
    os._exit(0)
runpy.run_module("mpispeed.watchdog.watchdog", run_name="__main__", alter_sys=True)
"""


def _handles(pids: Mapping[int, int]) -> dict[str, int]:
    """Handles of the ranks' processes: through them the kernel tells how a rank ended before the watchdog ran."""
    found = {}
    for rank, pid in pids.items():
        with contextlib.suppress(OSError, AttributeError):
            found[str(rank)] = os.pidfd_open(pid)
    return found


def _spawn(folder: Path, listener: socket.socket | None, handles: Sequence[int]) -> None:
    """Start the watchdog of this node, which outlives this process; the descriptors go to it."""
    words = [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", "-c", _BOOT, str(folder)]
    mark = reports.hold_mark()  # held from here on: the watchdog may start when all ranks have died
    passed = [*handles, *([] if mark is None else [mark])]
    own = list(passed)
    if listener is not None:
        passed.append(listener.fileno())
        words.append(str(listener.fileno()))
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"}
    watchdog = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed,
        start_new_session=True,
    )  # fmt: skip
    watchdog.wait()  # the watchdog itself is a grandchild: programs that wait for all of their children do not see it
    for descriptor in own:
        os.close(descriptor)
    if listener is not None:
        listener.close()


def _report_folder() -> tuple[str, bool]:
    """The folder for reports, and True if it is the folder of the run."""
    given = os.environ.get("MPISPEED_RUN_DIR")
    if given:
        return str(Path(given).absolute()), True
    name = os.environ.get("SLURM_JOB_ID") or time.strftime("%Y%m%d-%H%M%S")
    return str(Path.cwd() / REPORTS / name), False
