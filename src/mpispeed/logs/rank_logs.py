"""One log per rank in the folder of the run: everything it writes to stdout and stderr, to its last line.

Free of torch and MPI, because it begins before they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import io
import logging
import os
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from mpispeed.logs.relay import stamp

log = logging.getLogger(__name__)

VARIABLE = "MPISPEED_RUN_DIR"

DRAIN_SECONDS = 1.0
"""Time that an ending rank waits for the relay to take its last words: some systems end all processes with it."""

_WRITE_SECONDS = 0.02
"""Time for the relay to write what it has read, because only the reading can be observed."""

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")
_BEGUN: list[Path] = []
_FAILED: list[str] = []


def begin(rank: int | None = None, env: Mapping[str, str] = os.environ) -> Path | None:
    """Copy this process's output from now on to `rank-<r>.log` of MPISPEED_RUN_DIR; it still goes where it went before.

    The second call, and one without that variable, does nothing. Files that cannot be opened are reported once per
    node, and the run goes on without a log.

    Args:
        rank: this process's; by default the launcher's number, and nothing begins without one.
        env: the environment.

    Returns:
        The log, if there is one.
    """
    folder = env.get(VARIABLE, "")
    rank = launched_rank(env) if rank is None else rank
    if not folder or rank is None or _BEGUN or _FAILED:
        return None
    path = Path(folder).absolute() / f"rank-{rank}.log"  # scripts go to other folders
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        pipes = _start(path, f"rank {rank}, pid {os.getpid()} on {socket.gethostname()}")
    except OSError as error:
        _FAILED.append(str(error))
        if next((env[name] for name in _LOCAL_RANKS if env.get(name)), "0") == "0":
            log.warning("rank %d has no log, nor have others that fail alike: %s", rank, error)
        return None
    _BEGUN.append(path)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.closed:
            stream.reconfigure(line_buffering=True)  # what waits in a buffer is lost when the process is killed
    atexit.register(_drain, pipes)
    return path


def note(text: str) -> None:
    """Enter lines in the log only."""
    if not _BEGUN:
        return
    _drain((1, 2))
    before = stamp(time.time()) + b" e "
    lines = text.rstrip("\n").encode(errors="replace").split(b"\n")
    with contextlib.suppress(OSError), _BEGUN[0].open("ab") as file:
        file.write(b"".join(before + line + b"\n" for line in lines))


def launched_rank(env: Mapping[str, str]) -> int | None:
    """This process's number by its launcher, before MPI is joined; None without a launcher."""
    return next((int(env[name]) for name in _RANKS if env.get(name, "").isdigit()), None)


def _start(path: Path, head: str) -> tuple[int, int]:
    """Put a relay behind stdout and stderr."""
    _flush()
    made = [os.pipe(), os.pipe()]
    (out, to_out), (err, to_err) = made
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("relay.py")), str(out), str(err), str(path), head]
    try:
        # A session of its own, so that what the launcher sends to a group of processes does not end it.
        subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=(out, err), start_new_session=True)
    except OSError:
        for handle in (to_out, to_err):
            os.close(handle)
        raise
    finally:
        os.close(out)
        os.close(err)
    os.dup2(to_out, 1)
    os.dup2(to_err, 2)
    os.close(to_out)
    os.close(to_err)
    return 1, 2


def _drain(pipes: tuple[int, int]) -> None:
    """Wait until the relay has taken what is in the pipes."""
    _flush()
    end = time.monotonic() + DRAIN_SECONDS
    with contextlib.suppress(OSError):
        while any(_unread(pipe) for pipe in pipes) and time.monotonic() < end:
            time.sleep(0.002)
    time.sleep(_WRITE_SECONDS)


def _flush() -> None:
    """Flush buffered output; a script may have closed its streams, or have none."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _unread(pipe: int) -> int:
    found: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0\0\0\0"))[0]
    return found
