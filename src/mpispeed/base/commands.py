"""Commands of the system, such as SLURM's, run with a time limit."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def run_command(
    words: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command without input and return its exit code and output; `environ` stands in for the environment.

    Raises:
        TimeoutError: it did not end within `seconds`, and is killed.
        OSError: it cannot be started.
    """
    try:
        return subprocess.run(
            words, env=None if environ is None else dict(environ), capture_output=True, text=True, errors="replace",
            timeout=seconds, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        msg = f"{words[0]} did not answer within {seconds:.0f} s"
        raise TimeoutError(msg) from None
