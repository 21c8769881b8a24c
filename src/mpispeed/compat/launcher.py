"""`deepspeed.launcher.runner`: the name of the file with variables, and the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: a file of NAME=value lines in the home folder or the working folder, whose variables go to all ranks
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")


def main(args: Sequence[str] | None = None) -> None:
    """What the command `deepspeed` does: `mpispeed run` with its options."""
    import subprocess

    words = sys.argv[1:] if args is None else list(args)
    raise SystemExit(subprocess.call([sys.executable, "-m", "mpispeed", "run", "--as-deepspeed", *words]))


def _is_launching() -> bool:
    """True in `accelerate launch`, which imports this module right before it starts processes, and never else."""
    name = "accelerate.commands.launch"
    return name in sys.modules or getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") == name


if _is_launching():
    from mpispeed.compat.accelerate_launch import take_over

    take_over()
