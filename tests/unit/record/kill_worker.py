"""Writes run records until it is killed: for each folder, a line of its input, it forks a writer and prints its id.

The writer hands over points as fast as it can, in tables that are soon full; after each flush it puts the number of
rows that the file has by now into FOLDER/proven.
"""

import mmap
import os
import struct
import sys
from pathlib import Path

from mpispeed.record.record_file import RecordFile
from mpispeed.record.writer import RecordWriter

RESERVED = {"rows": 512, "names": 256, "notes": 2048, "spans": 16}


def write(folder):
    proven = folder / "proven"
    proven.write_bytes(bytes(8))
    with proven.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 8)
    append = RecordFile.append

    def told(self, *args, **kwargs):
        append(self, *args, **kwargs)
        shared[:8] = struct.pack("<Q", self.state.counts["rows"])

    RecordFile.append = told
    writer = RecordWriter(folder, {"config": {"a": 1}}, reserved=RESERVED, flush_seconds=0.0)
    number = 0
    while True:
        writer.row(f"series {number // 1000}", number / 2, step=number, samples=3 * number, rank=number % 7, time=1.0)
        if number % 100 == 0:
            writer.note("count", number=number)
        number += 1


for line in sys.stdin:
    child = os.fork()
    if not child:
        write(Path(line.rstrip("\n")))
    sys.stdout.write(f"{child}\n")
    sys.stdout.flush()
    os.waitpid(child, 0)
