"""`deepspeed.launcher.runner`: the name of the file with variables, and the command."""

from __future__ import annotations

import os
from collections.abc import Sequence

#: a file of NAME=value lines in the home folder or the working folder, whose variables go to all ranks
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")


def main(args: Sequence[str] | None = None) -> None:
    """What the command `deepspeed` does: `mpispeed run` with its options."""
    import subprocess
    import sys

    words = sys.argv[1:] if args is None else list(args)
    raise SystemExit(subprocess.call([sys.executable, "-m", "mpispeed", *words]))
