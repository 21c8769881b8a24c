"""Opens a store and reads the first batch; tells what that took beyond the imports. For a process of its own."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from mpispeed.data import ShardedLoader


def status(name):
    """A number of KiB of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def counted():
    """Bytes that system calls have read, and bytes that came from a disk."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"]), int(rows["read_bytes"])


def main(path, length, batch, documents):
    used, begun = status("VmRSS"), time.perf_counter()
    import mpispeed.tokens.windows as windows
    from mpispeed.tokens.store import open_store

    store = open_store(path)
    samples = windows.TokenWindows(store, length, documents=documents)
    first = next(iter(ShardedLoader(samples, micro_batch=batch, rank=0, size=1, seed=3)))
    seconds = time.perf_counter() - begun
    peak = status("VmHWM")  # ru_maxrss would be that of the process that has forked this one, if it was larger
    samples.read_batch([7])  # whatever is made once
    counted()
    overhead = -counted()[0] + counted()[0]
    handle = store.fileno()
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    before = counted()
    samples.read_batch(range(1000, 1000 + batch))
    calls, disk = (now - then for now, then in zip(counted(), before, strict=True))
    return {
        "seconds": seconds,
        "more_kib": peak - used,
        "samples": len(samples),
        "sums": [int(rows.sum()) for rows in first.values()],
        "read_by_calls": calls - overhead,
        "read_from_disk": disk,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "documents")))  # noqa: T201
