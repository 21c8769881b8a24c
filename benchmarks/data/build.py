"""Token stores built from lines of JSON by the tokenizer of bytes, beside copies of the same bytes.

    python benchmarks/data/build.py [--megabytes 200] [--folder DIR] [--json FILE]

The tokenizer of bytes costs next to nothing, so this is what a build costs beside a tokenizer. Each row is the best of
three runs that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mpispeed.mesh.backends.solo import solo_comm
from mpispeed.tokens_build.job import Request, build
from mpispeed.tokens_build.merging import merge

TURNS = 3


def lines(path: Path, megabytes: int) -> None:
    """Documents of English words, of lengths as those of web pages."""
    draw, words = random.Random(1), ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "it", "was", "good"]
    with path.open("w") as file:
        while file.tell() < megabytes << 20:
            text = " ".join(draw.choices(words, k=max(5, int(draw.lognormvariate(5, 1)))))
            file.write(json.dumps({"text": text}) + "\n")


def copy(source: Path, target: Path) -> None:
    """A copy through memory that is on the disk in the end, as a store is."""
    with source.open("rb") as reading, target.open("wb") as writing:
        while piece := reading.read(4 << 20):
            writing.write(piece)
        writing.flush()
        os.fsync(writing.fileno())


def main() -> None:
    """Measure, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        rows = measured(Path(name), given.megabytes)
    for row in rows:
        print("{name:<24} {tokens_per_second:>14,.0f} tokens/s {processor_seconds:>7.2f} s of a core".format(**row))
    if given.json:
        given.json.write_text(json.dumps({"megabytes": given.megabytes, "rows": rows}, indent=1) + "\n")


def measured(folder: Path, megabytes: int) -> list[dict[str, float | str]]:
    """Seconds of each way, and tokens by second."""
    source, store = folder / "corpus.jsonl", folder / "store.h5"
    lines(source, megabytes)
    tokens = build(solo_comm(), Request(store, [source], "byte")).tokens

    def built(target: Path, **settings: object) -> None:
        build(solo_comm(), Request(target, [source], "byte", **settings))

    ways: dict[str, Callable[[Path], object]] = {
        "copy of the store": lambda target: copy(store, target),
        "build": built,
        "build --pack 2048": lambda target: built(target, row=2048),
        "build --columns": lambda target: built(target, columns=("length", "rarity")),
        "merge of one": lambda target: merge(solo_comm(), target, [store]),
    }
    best = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            begun, worked = time.perf_counter(), time.process_time()
            way(folder / "made.h5")
            took = time.perf_counter() - begun, time.process_time() - worked
            best[name] = min(best[name], took)
            (folder / "made.h5").unlink()
    return [
        {"name": name, "seconds": wall, "processor_seconds": own, "tokens_per_second": tokens / wall}
        for name, (wall, own) in best.items()
    ]


if __name__ == "__main__":
    main()
