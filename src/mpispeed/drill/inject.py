"""Injects faults into a run, like those of hardware, systems and users: for drills and tests."""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from mpispeed.base.errors import UsageError
from mpispeed.drill.faults import ALL, KINDS, Fault, check_ranks, parse_faults
from mpispeed.mesh.comm import Comm
from mpispeed.watchdog.memory import memory_facts

log = logging.getLogger(__name__)

VARIABLE = "MPISPEED_INJECT"

_RESTARTS = ("MPISPEED_RESTART_COUNT", "SLURM_RESTART_COUNT")
_ELEMENTS = 4096
_LETTER_BYTES = 8 << 20
"""More than MPI libraries send before the receiver asks for it."""

_MEAL_BYTES = 16 << 20


class InjectedError(RuntimeError):
    """The Python error of a drill; the library does not handle it specially."""


def from_environment(comm: Comm, env: Mapping[str, str] = os.environ) -> Injector | None:
    """Return the faults of MPISPEED_INJECT on rank 0 for this rank; None in a job that was restarted after a fault.

    Launchers may give other nodes other variables, and a fault of communication needs all ranks to know of it.

    Collective over: `comm`, which has all ranks.

    Raises:
        ConfigError: on every rank, if the text cannot be read or names a rank that does not exist.
    """
    is_again = any(env.get(name, "0") not in ("", "0") for name in _RESTARTS)
    text = comm.transport.library_share("" if is_again else env.get(VARIABLE, "").strip(), 0)
    if not text:
        return None
    faults = parse_faults(text, VARIABLE)
    check_ranks(faults, comm.size, VARIABLE)
    return Injector([fault for fault in faults if fault.concerns(comm.rank)], comm)


class Injector:
    """Faults of one rank. The engine reports its place; each fault happens once, `slow` for its duration."""

    def __init__(self, faults: Sequence[Fault], comm: Comm) -> None:
        self._waiting, self._comm = list(faults), comm
        self._started = time.monotonic()
        self._saves = 0
        self._last_update = 0.0
        self._poisons_gradient = False
        self._old_limit: tuple[int, int] | None = None
        for fault in self._waiting:
            if fault.trigger == "seconds" and fault.kind == "kill":
                self._arm(fault)

    # -- calls of the engine -------------------------------------------------------------------------------------

    def at(self, place: str, step: int, module: torch.nn.Module | None = None) -> None:
        """Inject the faults of this place in step number `step`; in the forward pass `module` is about to run.

        Collective over: all ranks, where a fault is one of communication.
        """
        for fault in [each for each in self._waiting if each.place == place and self._is_due(each, step)]:
            if fault.kind == "slow":
                self._slow(fault, step)
                continue
            self._waiting.remove(fault)
            self._happen(fault, module)
        if place == "update":
            self._last_update = time.monotonic()

    def gradient(self, grad: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of `grad`, the gradient of a module's output, with one NaN if a fault is due; else None."""
        if not self._poisons_gradient:
            return None
        self._poisons_gradient = False
        poisoned = grad.clone()
        poisoned[(0,) * poisoned.dim()] = math.nan  # views need a certain order in memory
        return poisoned

    def before_save(self) -> None:
        """Inject the faults of the next save, before its checkpoint is written."""
        self._saves += 1
        for fault in [each for each in self._waiting if self._is_due_at_save(each) and each.kind != "corrupt"]:
            self._waiting.remove(fault)
            self._happen(fault, None)

    def after_save(self, path: str) -> None:
        """Damage files of the complete checkpoint in folder `path`, on the rank of the fault."""
        for fault in [each for each in self._waiting if self._is_due_at_save(each) and each.kind == "corrupt"]:
            self._waiting.remove(fault)
            if fault.rank in (ALL, self._comm.rank):
                self._say(fault, f"damages a file of {path}")
                damage(Path(path), fault.options["file"], fault.options["how"])

    def free_disk(self) -> None:
        """Let files grow again."""
        if self._old_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._old_limit)
            self._old_limit = None

    # -- parts ---------------------------------------------------------------------------------------------------

    def _is_due(self, fault: Fault, step: int) -> bool:
        if fault.trigger == "seconds":
            return fault.kind != "kill" and time.monotonic() - self._started >= fault.at
        return fault.trigger == "step" and (step >= fault.at if fault.kind == "slow" else step == fault.at)

    def _is_due_at_save(self, fault: Fault) -> bool:
        return fault.trigger == "save" and fault.at == self._saves

    def _arm(self, fault: Fault) -> None:
        """Send a signal after a time, whatever the rank is doing then."""
        timer = threading.Timer(fault.at, self._happen, (fault, None))
        timer.daemon = True
        timer.start()

    def _say(self, fault: Fault, what: str) -> None:
        log.warning("drill %s, on rank %d: %s", fault.text, self._comm.rank, what)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()

    def _happen(self, fault: Fault, module: torch.nn.Module | None) -> None:
        if KINDS[fault.kind].is_everywhere:
            self._communicate(fault)
        elif fault.kind == "nan":
            self._poison(fault, module)
        else:
            self._say(fault, KINDS[fault.kind].what)
            {
                "kill": _kill, "exit": _exit, "error": _raise, "stall": _stall, "memory": _take_memory,
                "full_disk": self._fill_disk, "send": self._send,
            }[fault.kind](fault)  # fmt: skip

    def _slow(self, fault: Fault, step: int) -> None:
        if step >= fault.at + fault.options["steps"]:
            self._waiting.remove(fault)
            return
        if step == fault.at:
            self._say(fault, KINDS["slow"].what)
        took = time.monotonic() - self._last_update if self._last_update else 0.0
        time.sleep(fault.options["seconds"] + (fault.options["factor"] - 1) * took)

    def _poison(self, fault: Fault, module: torch.nn.Module | None) -> None:
        what = fault.options["what"]
        self._say(fault, f"a {what} becomes not a number")
        if what == "gradient":
            self._poisons_gradient = True
        elif module is not None:
            with torch.no_grad():
                weights = next(module.parameters(recurse=False))
                weights[(0,) * weights.dim()] = math.nan

    def _fill_disk(self, fault: Fault) -> None:
        """Limit the size of files, because nobody may fill a real disk: writes fail too, only for another reason."""
        self._old_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.options["bytes"], self._old_limit[1]))

    def _send(self, fault: Fault) -> None:
        peer = (self._comm.rank + 1) % self._comm.size
        self._comm.send(torch.zeros(_LETTER_BYTES, dtype=torch.uint8), peer, tag=77)

    def _communicate(self, fault: Fault) -> None:
        """Call a collective on all ranks, on one of them wrongly. Collective over: all ranks."""
        is_odd = fault.rank in (ALL, self._comm.rank)
        if is_odd:
            self._say(fault, KINDS[fault.kind].what)
        kind, comm = fault.kind, self._comm
        if kind == "order":
            first, second = (_gather, _reduce) if is_odd else (_reduce, _gather)
            first(comm)
            second(comm)
        elif kind == "size":
            _reduce(comm, count=_ELEMENTS // 2 if is_odd else _ELEMENTS)
        elif kind == "dtype":
            _reduce(comm, dtype=torch.int32 if is_odd else torch.float32)
        elif not is_odd:
            _reduce(comm)


def _reduce(comm: Comm, count: int = _ELEMENTS, dtype: torch.dtype = torch.float32) -> None:
    """Collective over: all ranks."""
    comm.all_reduce(torch.zeros(count, dtype=dtype))


def _gather(comm: Comm) -> None:
    """Collective over: all ranks."""
    comm.all_gather(torch.zeros(_ELEMENTS * comm.size), torch.zeros(_ELEMENTS))


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), fault.options["signal"])


def _exit(fault: Fault) -> NoReturn:
    sys.exit(fault.options["code"])


def _raise(fault: Fault) -> NoReturn:
    msg = f"injected by {fault.text}"
    raise InjectedError(msg)


def _stall(fault: Fault) -> None:
    end = time.monotonic() + fault.options["seconds"]
    while time.monotonic() < end:
        time.sleep(min(3600.0, max(0.0, end - time.monotonic())))


def _take_memory(fault: Fault) -> NoReturn:
    """Take memory until the kernel or Python refuses.

    Raises:
        MemoryError: at a limit of addresses; at one of a control group the kernel ends the process.
        UsageError: there is no limit, and the node would run out of memory.
    """
    size = fault.options["bytes"]
    old = resource.getrlimit(resource.RLIMIT_AS)
    facts = memory_facts(os.getpid())
    if size is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, old[1]))
    elif facts.limit_bytes is None and facts.address_limit_bytes is None:
        msg = (
            f"the fault {fault.text!r} would take all memory of this node, because this process has no limit; give "
            "one, such as memory:bytes=1GiB, or run inside a job with --mem"
        )
        raise UsageError(msg)
    held = []
    try:
        while True:
            held.append(b"\1" * _MEAL_BYTES)
    except MemoryError:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, old)
        raise


def damage(folder: Path, what: str, how: str) -> Path:
    """Damage one file of a checkpoint: flip a byte in its middle, cut it in half, or remove it; return its name.

    Raises:
        UsageError: the checkpoint has no such file.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.startswith(what))
    if not found:
        names = ", ".join(sorted(path.name for path in folder.rglob("*") if path.is_file()))
        msg = f"there is no {what} file in {folder} to damage; it has {names or 'no files'}"
        raise UsageError(msg)
    path = max(found, key=lambda each: each.stat().st_size)
    if how == "remove":
        path.unlink()
        return path
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "truncate":
            file.truncate(size // 2)
        else:
            file.seek(size // 2)
            byte = file.read(1)
            file.seek(size // 2)
            file.write(bytes([byte[0] ^ 0xFF]))
    return path
