"""A control group with a memory limit, made below the one of this process where the system lets us."""

import contextlib
import os
import time

from mpispeed.watchdog.memory import Groups


@contextlib.contextmanager
def limited_group(limit_bytes):
    """(folder of the group, ""), or (None, the reason why there is none)."""
    own = Groups.of(os.getpid())
    if not own.folders:
        yield None, "no control group counts the memory of this process"
        return
    folder = own.folders[0] / f"mpispeed-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if own.is_version_1 else "memory.max")).write_text(str(limit_bytes))
        if not own.is_version_1:
            (folder / "memory.swap.max").write_text("0")
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        yield None, f"control groups of memory cannot be made here: {error}"
        return
    try:
        yield folder, ""
    finally:
        _remove(folder)


def _remove(folder):
    """A group can be removed once the last of its processes is gone."""
    for _ in range(100):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.05)
        else:
            return
    folder.rmdir()
