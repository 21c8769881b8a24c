"""Trial of swap folders before training: usability, free space, integrity and speed on every rank.

All problems of all ranks are reported at once, because queueing again for each missing folder wastes days.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import ConfigError, MpispeedError
from mpispeed.base.log import once
from mpispeed.base.units import format_bytes, format_ranks
from mpispeed.native.block_io import BlockIO, Options, Transfer, aligned
from mpispeed.store.mounts import UNKNOWN, Mount, free_bytes, mount_of
from mpispeed.store.owner import make_folder
from mpispeed.store.private_folder import run_name
from mpispeed.store.swap import SwapFolder, clean_stale

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

MARGIN_PERCENT = 1
"""Free space wanted above the sum of what the ranks want: the file system's own blocks, owner files, the trial."""

LEAST_TRIAL_BYTES, MOST_TRIAL_BYTES = 8 << 20, 32 << 20
"""Length of the trial transfer between these, so that the queue fills if it is not very deep."""

PAGE = 4096

ODD_PLACE, ODD_BYTES = 1233, 5331
"""A tail of so many bytes, in two pieces cut here: addresses and lengths that direct transfers cannot do alone."""

_LOCAL = "name a folder of a local disk (nvme_path)"


@dataclass(frozen=True, slots=True)
class _Facts:
    """State of a rank's folder before anyone writes."""

    host: str
    node: int
    root: str
    wanted_bytes: int
    device: int = -1
    mount: Mount = UNKNOWN
    free: int | None = None
    problem: str = ""

    @property
    def file_system(self) -> tuple[object, ...]:
        """Key of shared free space; on the network the source, because device numbers differ between nodes."""
        return ("network", self.mount.source) if self.mount.is_network else (self.node, self.device)


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements of a rank in its folder.

    Attributes:
        backend: backend of transfers, with these options.
        is_direct: True if they pass the page cache by (O_DIRECT).
        write_rate: bytes per second, all ranks at once.
        read_rate: bytes per second; from the page cache if not `is_direct`.
    """

    backend: str
    is_direct: bool
    write_rate: float
    read_rate: float


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of all ranks, in rank order; equal on all ranks.

    Attributes:
        hosts: node of each rank.
        roots: the folder each rank was given.
        mounts: file system of that folder.
        wanted_bytes: bytes that each rank will write.
        trials: measurements of each rank.
    """

    hosts: Sequence[str]
    roots: Sequence[str]
    mounts: Sequence[Mount]
    wanted_bytes: Sequence[int]
    trials: Sequence[Trial]

    @property
    def backend(self) -> str:
        """The backend, or the backends of the ranks."""
        return "/".join(sorted({trial.backend for trial in self.trials}))

    @property
    def is_direct(self) -> bool:
        """True if all ranks pass the page cache by."""
        return all(trial.is_direct for trial in self.trials)

    @property
    def slowest_write(self) -> int:
        """Rank with the lowest write rate."""
        return min(range(len(self.trials)), key=lambda rank: self.trials[rank].write_rate)

    @property
    def slowest_read(self) -> int:
        """Rank with the lowest read rate."""
        return min(range(len(self.trials)), key=lambda rank: self.trials[rank].read_rate)

    @property
    def buffered_ranks(self) -> list[int]:
        """Ranks whose transfers go through the page cache."""
        return [rank for rank, trial in enumerate(self.trials) if not trial.is_direct]

    def describe(self) -> list[tuple[str, str]]:
        """Rows (what, value) for a log."""
        write, read = self.slowest_write, self.slowest_read
        cached = "" if self.is_direct else ", from the page cache where buffered"
        return [
            ("backend", self.backend),
            ("direct", "yes" if self.is_direct else f"no, buffered on {format_ranks(self.buffered_ranks)}"),
            ("file system", "/".join(sorted({mount.type for mount in self.mounts}))),
            ("wanted", f"{format_bytes(sum(self.wanted_bytes))} on {format_ranks(range(len(self.trials)))}"),
            ("write", f"{_rate(self.trials[write].write_rate)} on the slowest, rank {write} on {self.hosts[write]}"),
            ("read", f"{_rate(self.trials[read].read_rate)} on the slowest, rank {read} on {self.hosts[read]}{cached}"),
        ]

    def warnings(self) -> list[str]:
        """Warnings about slow but working set-ups."""
        found = []
        if self.buffered_ranks:
            found.append(
                f"swap files of {self._subject(self.buffered_ranks)} go through the page cache (no O_DIRECT there): "
                "they take host memory too, and the rates are not those of the disk"
            )
        in_memory = [rank for rank, mount in enumerate(self.mounts) if mount.is_memory]
        if in_memory:
            found.append(
                f"swap files of {self._subject(in_memory)} are host memory, which saves nothing over device cpu; "
                f"{_LOCAL}"
            )
        on_network = [rank for rank, mount in enumerate(self.mounts) if mount.is_network]
        if on_network:
            found.append(
                f"swap files of {self._subject(on_network)} are on a network file system, whose bandwidth all nodes "
                f"share; {_LOCAL}"
            )
        return found

    def _subject(self, ranks: Sequence[int]) -> str:
        first = ranks[0]
        return f"{format_ranks(ranks)} ({self.mounts[first].type} at {self.roots[first]} on {self.hosts[first]})"


def preflight(world_comm: Comm, node_comm: Comm, root: Path, wanted_bytes: int, options: Options) -> Report:
    """Remove leftovers of killed runs, then try the swap folder of every rank with the options of training.

    A folder that is missing is made, for this user alone, and stays.

    Rank 0 logs the rates and warns of buffered transfers and of file systems in memory and in the network.

    Args:
        world_comm: all ranks.
        node_comm: the ranks of this node.
        root: the folder that the user named, on this node.
        wanted_bytes: bytes that this rank will keep in swap files.
        options: of the transfers.

    Collective over: all ranks.

    Raises:
        ConfigError: on all ranks, with everything that is wrong on any of them: the folder cannot be made, is no
            folder, read-only, too full, refuses transfers, or gives back other bytes.
    """
    if node_comm.rank == 0:
        clean_stale(root)
    # The names come from a gather, not a broadcast: free space counts only after every node has cleaned.
    run = world_comm.gather_objects(run_name() if world_comm.rank == 0 else "")[0]
    facts: list[_Facts] = world_comm.gather_objects(_look(root, node_comm.ranks[0], wanted_bytes))
    problems = {rank: fact.problem for rank, fact in enumerate(facts) if fact.problem}
    for rank, shortage in _shortages(facts).items():
        problems[rank] = f"{problems[rank]}; {shortage}" if rank in problems else shortage
    mine = problems.get(world_comm.rank)
    outcomes = world_comm.gather_objects(_try(root, f"{run}-trial", world_comm.rank, options) if mine is None else mine)
    trials = [outcome for outcome in outcomes if isinstance(outcome, Trial)]
    if len(trials) < world_comm.size:
        raise ConfigError(_text(facts, outcomes))
    report = Report(
        hosts=[fact.host for fact in facts],
        roots=[fact.root for fact in facts],
        mounts=[fact.mount for fact in facts],
        wanted_bytes=[fact.wanted_bytes for fact in facts],
        trials=trials,
    )
    if world_comm.rank == 0:
        log.info("swap files: %s", "; ".join(f"{what} {value}" for what, value in report.describe()))
        for warning in report.warnings():
            once(log, logging.WARNING, warning)
    return report


def _look(root: Path, node: int, wanted_bytes: int) -> _Facts:
    """The state of the folder, which is made if it is missing."""
    host = socket.gethostname()
    try:
        problem = "" if root.exists() else _make(root)
        if problem:
            return _Facts(host, node, str(root), wanted_bytes, problem=problem)
        device, is_folder = root.stat().st_dev, root.is_dir()
        mount, free = mount_of(root), free_bytes(root)
    except (OSError, ValueError) as failure:
        reason = (failure.strerror if isinstance(failure, OSError) else None) or str(failure)
        return _Facts(host, node, str(root), wanted_bytes, problem=reason)
    problem = ""
    if not is_folder:
        problem = f"it is no folder; {_LOCAL}"
    elif not os.access(root, os.W_OK | os.X_OK, effective_ids=True):
        is_read_only = os.statvfs(root).f_flag & os.ST_RDONLY
        why = "it is mounted read-only" if is_read_only else f"user {os.geteuid()} may not write to it"
        problem = f"{why}; {_LOCAL}"
    return _Facts(host, node, str(root), wanted_bytes, device, mount, free, problem)


def _make(root: Path) -> str:
    """Make the folder; returns "" or the problem."""
    try:
        make_folder(root)
    except OSError as failure:
        return f"it does not exist and cannot be made ({failure.strerror}); make it (mkdir -p), or {_LOCAL}"
    return ""


def _shortages(facts: Sequence[_Facts]) -> dict[int, str]:
    """Messages for ranks on file systems with less space than their ranks want together."""
    sharing: dict[tuple[object, ...], list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.free is not None:
            sharing.setdefault(fact.file_system, []).append(rank)
    found = {}
    for ranks in sharing.values():
        wanted = sum(facts[rank].wanted_bytes for rank in ranks)
        wanted += -(-wanted * MARGIN_PERCENT // 100)
        free = min(facts[rank].free or 0 for rank in ranks)
        if free < wanted:
            text = (
                f"the file system is too full: {format_ranks(ranks)} want {_exactly(wanted)} together, "
                f"{MARGIN_PERCENT} % to spare included, and {_exactly(free)} are free; free {_exactly(wanted - free)} "
                f"more, use more nodes, or {_LOCAL}"
            )
            found.update(dict.fromkeys(ranks, text))
    return found


def _try(root: Path, run: str, rank: int, options: Options) -> Trial | str:
    """The measurements, or an error message; raises nothing, because the other ranks wait for the outcome."""
    try:
        folder = SwapFolder(root, run, rank)
        try:
            return _measure(folder, options)
        finally:
            folder.remove()
    except (MpispeedError, OSError) as failure:
        return str(failure)
    except Exception as failure:
        log.exception("the trial of swap files failed")
        return f"{type(failure).__name__}: {failure}"


def _measure(folder: SwapFolder, options: Options) -> Trial | str:
    """Write random bytes, read them back, compare."""
    depth_bytes = options.block_size * options.queue_depth * options.threads
    head = min(max(LEAST_TRIAL_BYTES, depth_bytes), MOST_TRIAL_BYTES) // PAGE * PAGE
    total = head + ODD_BYTES
    pieces = [(0, head), (head, head + ODD_PLACE), (head + ODD_PLACE, total)]
    written, found = aligned(total), aligned(total)
    make = torch.Generator().manual_seed(secrets.randbits(63))
    written.random_(0, 256, generator=make)
    # The complement: no byte is right before it has been read.
    torch.bitwise_not(written, out=found)
    file = folder.file("trial", total)
    with closing(BlockIO(options)) as io:
        write_seconds = _timed(lambda start, end: io.write(file, written[start:end], start), pieces)
        read_seconds = _timed(lambda start, end: io.read(file, found[start:end], start), pieces)
        # Without O_DIRECT "auto" takes threads for the file, because the kernel's queue would block.
        backend = "threads" if options.backend == "auto" and not file.is_direct else io.backend
    if not torch.equal(written, found):
        wrong = int((written != found).nonzero()[0])
        mode = "direct" if file.is_direct else "buffered"
        return (
            f"{file.path} gave back other bytes than were written, first at byte {wrong} of {total} (backend "
            f"{backend}, {mode}); the disk or its file system is broken: {_LOCAL}"
        )
    return Trial(backend, file.is_direct, head / write_seconds, head / read_seconds)


def _timed(transfer: Callable[[int, int], Transfer], pieces: Sequence[tuple[int, int]]) -> float:
    """Seconds of the first, long piece; the others follow one by one, because they share blocks."""
    seconds = []
    for start, end in pieces:
        begin = time.perf_counter()
        transfer(start, end).wait()
        seconds.append(max(time.perf_counter() - begin, 1e-9))
    return seconds[0]


def _text(facts: Sequence[_Facts], outcomes: Sequence[Trial | str]) -> str:
    """All problems; those that ranks share appear once."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, (fact, outcome) in enumerate(zip(facts, outcomes, strict=True)):
        if not isinstance(outcome, Trial):
            groups.setdefault((fact.host, fact.root, outcome), []).append(rank)
    lines = []
    for (host, root, problem), ranks in groups.items():
        wanted = sum(facts[rank].wanted_bytes for rank in ranks)
        free = facts[ranks[0]].free
        shown = "unknown" if free is None else _exactly(free)
        lines.append(
            f"{format_ranks(ranks)} on {host}, folder {root!r} (wanted {_exactly(wanted)}, free {shown}): {problem}"
        )
    bad = sum(map(len, groups.values()))
    return "\n  ".join([f"swap files cannot be used on {bad} of {len(facts)} ranks:", *lines])


def _exactly(count_bytes: int) -> str:
    return f"{format_bytes(count_bytes)} ({count_bytes} bytes)"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s"
