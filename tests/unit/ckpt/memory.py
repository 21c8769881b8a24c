"""Memory that a piece of work needs, as the system sees it."""

import threading
from contextlib import contextmanager
from pathlib import Path


def resident():
    """Bytes of this process that are in memory, anonymous ones only: mapped files come and go."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    message = "no RssAnon in /proc/self/status"
    raise RuntimeError(message)


@contextmanager
def watched():
    """Look at the memory all the time; gives a list that ends with the bytes it grew by at most."""
    grown, done, first = [0], threading.Event(), resident()

    def look():
        while not done.wait(0.001):
            grown[0] = max(grown[0], resident() - first)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()
