"""Joins a world and leaves it in the way named by the first argument; the last rank is the odd one out."""

import argparse
import sys
import threading

from mpispeed.base.errors import CommError, ConfigError
from mpispeed.mesh import start


def fail():
    """Fail in a thread."""
    msg = "planted in a thread"
    raise ZeroDivisionError(msg)


def main(how: str) -> None:
    """Leave as `how` says, or wait for everyone."""
    world = start()
    is_last = world.rank == world.size - 1
    if how == "thread" and is_last:
        threading.Thread(target=fail).start()
    elif how == "exit" and is_last:
        sys.exit(3)
    elif how == "exit_all":
        sys.exit(4)
    elif how == "config_all":
        msg = "micro batch 3 does not fit"
        raise ConfigError(msg)
    elif how == "config_one" and is_last:
        msg = "only here"
        raise ConfigError(msg)
    elif how == "comm" and is_last:
        msg = "buffers do not fit"
        raise CommError(msg)
    elif how == "agree":
        world.comm.agree(not is_last, "disk full")
    elif how == "usage" and is_last:
        argparse.ArgumentParser().parse_args(["--unknown"])
    if how != "fine":
        world.comm.barrier()


main(sys.argv[1])
