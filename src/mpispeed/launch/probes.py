"""Questions to processes of their own, because a library may crash and a file system may hang."""

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
"""What a process gets to end by itself, and then to be ended."""

Answer = tuple[Any, str]
"""(what was answered, "") or (None, why there is no answer)."""


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
    """As `ask`, of any program."""
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
    """(exit code, what it wrote, what it complained); the code is None if it had to be ended, with the reason."""
    # Files, not pipes: what it has started itself may keep a pipe open for ever.
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
    """Files in the current folder do not replace modules."""
    return {**(os.environ if environ is None else environ), "PYTHONSAFEPATH": "1"}


def _end(process: subprocess.Popen[bytes], *, is_group: bool) -> None:
    """Ask it to end, then end it; a process that a dead file system holds stays behind."""
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
