"""`accelerate launch --use_deepspeed` with ranks of MPI: what it hands to torch's launcher starts as `mpispeed run`.

For several machines it calls the command `deepspeed` instead, which is found on PATH.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from mpispeed.base.errors import UsageError
from mpispeed.compat.as_deepspeed import add_command


def take_over() -> None:
    """Serve the launch that this process is about to make; any launch without DeepSpeed stays with torch."""
    from torch.distributed import run as launcher

    theirs = launcher.run

    def run(args: Any) -> Any:
        return start(args) if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" else theirs(args)

    launcher.run = run
    add_command(os.environ)


def start(args: Any) -> NoReturn:
    """Become `mpispeed run`, with accelerate's variables: signals and the exit code are those of the job.

    Args:
        args: options of torch's launcher.
    """
    try:
        words = words_of(args)
    except UsageError as error:
        sys.stderr.write(f"mpispeed: {error}\n")
        raise SystemExit(2) from None
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "mpispeed", *words])


def words_of(args: Any) -> list[str]:
    """The words of `mpispeed` for options of torch's launcher.

    Without a number of processes there are as many ranks as `mpispeed run` takes by itself.

    Raises:
        UsageError: each machine is to start its own processes.
    """
    nodes = str(args.nnodes or "1")
    if nodes not in ("1", "1:1"):
        msg = (
            f"--num_machines {nodes} with the launcher standard starts processes on each machine by itself, and MPI "
            "starts all ranks at once; call accelerate launch on one machine, with --deepspeed_multinode_launcher "
            "openmpi --deepspeed_hostfile FILE, or inside a SLURM job with --num_machines 1"
        )
        raise UsageError(msg)
    ranks = str(args.nproc_per_node)
    count = ["-n", ranks] if ranks.isdigit() and int(ranks) else []
    kind = [*(["--module"] if args.module else []), *(["--no-python"] if args.no_python else [])]
    return ["run", *count, "--as-deepspeed", *kind, args.training_script, *args.training_script_args]
