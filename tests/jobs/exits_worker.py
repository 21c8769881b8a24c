"""Joins a world and leaves it in the way named by the first argument; the last rank is the odd one out."""

import argparse
import contextlib
import sys
import threading
import time

from mpispeed.base.errors import CommError, ConfigError
from mpispeed.mesh import start


def fail():
    """Fail in a thread."""
    msg = "planted in a thread"
    raise ZeroDivisionError(msg)


def leave(status):
    """Leave without sys.exit."""
    raise SystemExit(status)


def catch():
    """Go on after a sys.exit, as a script does that calls the main function of another."""
    with contextlib.suppress(SystemExit):
        sys.exit(3)


def report():
    """Outlast what ranks that failed would wait."""
    time.sleep(7)
    sys.stderr.write("rank 0 wrote its results\n")


LEAVES = {
    "exit": lambda: sys.exit(3),
    "raise": lambda: leave(3),
    "raise_text": lambda: leave("no data here"),
    "caught": catch,
    "usage": lambda: argparse.ArgumentParser().parse_args(["--unknown"]),
}


def main(how: str) -> None:
    """Leave as `how` says, or wait for everyone."""
    world = start()
    is_last = world.rank == world.size - 1
    if how == "thread" and is_last:
        threading.Thread(target=fail).start()
    elif how in LEAVES and is_last:
        LEAVES[how]()
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
    if how != "fine":
        world.comm.barrier()
    if how == "caught" and world.rank == 0:
        report()


main(sys.argv[1])
