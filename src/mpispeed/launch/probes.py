"""Probes in processes of their own, because a library may crash and a file system may hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

KILL_SECONDS = 5.0
"""Time for a process to end by itself after a request, and again after it was killed."""

Answer = tuple[Any, str]
"""(answer, "") or (None, the reason why there is none)."""


def ask(
    words: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None, is_rank: bool = False
) -> Answer:
    """Run `python WORDS...` and decode the last line it writes as JSON.

    Args:
        words: arguments of the interpreter.
        seconds: time limit.
        environ: its environment; None: ours.
        is_rank: it joins the MPI job in our place, so what the launcher left open for us stays open for it.
    """
    return run([sys.executable, *words], seconds=seconds, environ=environ, is_rank=is_rank)


def run(
    argv: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None, is_rank: bool = False
) -> Answer:
    """Like `ask`, for any program."""
    code, out, err = call(argv, seconds=seconds, environ=environ, is_rank=is_rank)
    if code is None:
        return None, err
    for line in reversed(out.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line), ""
    lines = [line.strip() for line in (err.strip() or out.strip()).splitlines() if line.strip()]
    return None, lines[-1] if lines else _ending(code)


def call(
    argv: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None, is_rank: bool = False
) -> tuple[int | None, str, str]:
    """Return (exit code, stdout, stderr); for a process that had to be killed, None and the reason."""
    # Files, not pipes: programs that it has started may keep a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment(environ),
                start_new_session=not is_rank, close_fds=not is_rank,
            )  # fmt: skip
        except OSError as error:
            return None, "", f"{argv[0]} cannot be started: {error.strerror}"
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(process, is_group=not is_rank)
            return None, _text(out), f"no answer within {seconds:.0f} s"
        except BaseException:
            _end(process, is_group=not is_rank)
            raise
        return code, _text(out), _text(err)


def _environment(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Environment in which files in the current folder do not replace modules."""
    return {**(os.environ if environ is None else environ), "PYTHONSAFEPATH": "1"}


def _end(process: subprocess.Popen[bytes], *, is_group: bool) -> None:
    """Ask a process to end, then kill it; one that a dead file system holds stays behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number) if is_group else process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=KILL_SECONDS)
            return


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a word"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
