"""Batches of 8 x 2048 tokens from a token store, beside what else reads them: fio, Arrow, a memory map.

    python benchmarks/data/reads.py [--folder DIR] [--mib 1024] [--rounds 5] [--json FILE]

Cold: nothing of the file is in memory, samples are chosen by chance, and fio reads blocks of the same size at the same
depth from the same file, past the cache of the kernel. It is told to wait for all blocks of a batch before it asks for
the next one, as a batch does; its rate without that is shown beside it. Rounds of both alternate.

Warm: the file is in memory, and every way ends in the same int64 tensor [8, 2048], a new one for each batch; ways
alternate. Beside the clock stands the thread's own time, which other work on the machine changes less.

Needs fio, pyarrow and datasets (pip install pyarrow datasets); what is missing is named and left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpispeed.tokens.create import StoreWriter, create, finish
from mpispeed.tokens.store import TokenStore, open_store
from mpispeed.tokens.windows import TokenWindows

BATCH, LENGTH = 8, 2048
COLD_SECONDS = 2.0
WARM_BATCHES = 1500
PIECE = 8 << 20  # tokens

Read = Callable[[np.ndarray], torch.Tensor]


def make_store(path: Path, tokens: int) -> None:
    """A store of random tokens in documents of 1024."""
    places = create(path, tokens=tokens, documents=tokens // 1024, dtype="u2", facts={"vocabulary_size": 50257})
    dice = np.random.default_rng(1)
    with StoreWriter(path, places) as writer:
        for first in range(0, tokens, PIECE):
            writer.put("tokens", first, dice.integers(0, 50257, min(PIECE, tokens - first), dtype=np.uint16))
        writer.put("documents", 0, np.arange(0, tokens + 1, 1024))
        writer.put_lookup(0, places.tables["lookup"].count)
    finish(path, places)  # without checksums of blocks, which reads do not look at


def drop(path: Path) -> None:
    """Put a file out of the cache of the kernel."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def cold_rate(store: TokenStore, samples: TokenWindows, seed: int) -> float:
    """MiB of tokens per second, of samples that are not in memory."""
    drop(store.path)
    numbers = np.random.default_rng(seed).permutation(len(samples))
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < COLD_SECONDS and done + BATCH <= len(numbers):
        samples.read_batch(numbers[done : done + BATCH])
        done += BATCH
    return done * LENGTH * 2 / (time.perf_counter() - began) / 2**20


def fio_rate(path: Path, offset: int, nbytes: int, seed: int, *, in_batches: bool) -> float:
    """MiB per second of fio."""
    drop(path)
    words = [
        "fio", "--name=reads", f"--filename={path}", "--readonly", "--rw=randread", f"--bs={2 * LENGTH}",
        f"--offset={offset}", f"--size={nbytes}", "--direct=1", "--ioengine=io_uring", f"--iodepth={BATCH}",
        "--time_based", f"--runtime={COLD_SECONDS}", f"--randseed={seed}", "--output-format=json",
    ]  # fmt: skip
    if in_batches:
        words += [f"--iodepth_batch_submit={BATCH}", f"--iodepth_batch_complete_min={BATCH}"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return float(found["jobs"][0]["read"]["bw_bytes"]) / 2**20


def measure_cold(store: TokenStore, rounds: int) -> dict[str, Any]:
    """Rates of both, in turn."""
    place = store.places.tables["tokens"]
    samples = TokenWindows(store, LENGTH, labels="none")
    has_fio = shutil.which("fio") is not None
    if not has_fio:
        print("fio is not installed; cold reads are not compared", file=sys.stderr)
    rows: dict[str, list[float]] = {"store": [], "fio": [], "fio without waiting for batches": []}
    for number in range(rounds):
        rows["store"].append(cold_rate(store, samples, number))
        if has_fio:
            rows["fio"].append(fio_rate(store.path, place.offset, place.nbytes, number, in_batches=True))
            rate = fio_rate(store.path, place.offset, place.nbytes, number, in_batches=False)
            rows["fio without waiting for batches"].append(rate)
    return {name: found for name, found in rows.items() if found}


def by_map(path: Path, offset: int, tokens: int) -> Read:
    """A memory map, each row copied into the tensor."""
    mapped = np.memmap(path, "<u2", "r", offset, (tokens,))

    def read(numbers: np.ndarray) -> torch.Tensor:
        out = torch.empty(BATCH, LENGTH, dtype=torch.int64)
        rows = out.numpy()
        for row, number in enumerate(numbers.tolist()):
            rows[row] = mapped[number * LENGTH : (number + 1) * LENGTH]
        return out

    return read


def by_flat_arrow(table: Any) -> Read:
    """One Arrow array of all tokens in a memory-mapped file, each row copied into the tensor."""
    tokens = table.column(0).chunk(0)

    def read(numbers: np.ndarray) -> torch.Tensor:
        out = torch.empty(BATCH, LENGTH, dtype=torch.int64)
        rows = out.numpy()
        for row, number in enumerate(numbers.tolist()):
            rows[row] = tokens.slice(number * LENGTH, LENGTH).to_numpy()
        return out

    return read


def by_list_arrow(table: Any) -> Read:
    """An Arrow column of lists in a memory-mapped file, rows taken by pyarrow."""
    lists = table.column(0).chunk(0)

    def read(numbers: np.ndarray) -> torch.Tensor:
        taken = lists.take(numbers)
        return torch.from_numpy(taken.flatten().to_numpy().astype(np.int64).reshape(BATCH, LENGTH))

    return read


def by_datasets(table: Any) -> Read:
    """The same file by Hugging Face datasets, in torch's format."""
    datasets = importlib.import_module("datasets")
    found = datasets.Dataset(table).with_format("torch")
    return lambda numbers: found[numbers.tolist()]["tokens"]


def arrow_files(folder: Path, store: TokenStore) -> Iterator[tuple[str, Read]]:
    """Ways to read the same tokens by Arrow, after their files are written."""
    pa = importlib.import_module("pyarrow")
    values = np.memmap(store.path, "<u2", "r", store.places.tables["tokens"].offset, (store.token_count,))
    used = store.token_count // LENGTH * LENGTH
    flat = pa.array(values[:used])
    ends = pa.array(np.arange(0, used + 1, LENGTH, dtype=np.int32))
    for name, column in (("flat", flat), ("list", pa.ListArray.from_arrays(ends, flat))):
        path = folder / f"{name}.arrow"
        table = pa.table({"tokens": column})
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    flat_table = pa.ipc.open_stream(pa.memory_map(str(folder / "flat.arrow"))).read_all()
    list_table = pa.ipc.open_stream(pa.memory_map(str(folder / "list.arrow"))).read_all()
    yield "arrow, flat", by_flat_arrow(flat_table)
    yield "arrow, lists", by_list_arrow(list_table)
    if importlib.util.find_spec("datasets") is None:
        print("datasets is not installed; it is left out", file=sys.stderr)
        return
    datasets = importlib.import_module("datasets")
    yield "datasets", by_datasets(datasets.table.MemoryMappedTable.from_file(str(folder / "list.arrow")))


def measure_warm(folder: Path, store: TokenStore, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of a batch each way, in turn, after all were found to read the same."""
    samples = TokenWindows(store, LENGTH, labels="none")
    place = store.places.tables["tokens"]
    ways: dict[str, Read] = {
        "store": lambda numbers: samples.read_batch(numbers)["input_ids"],
        "memory map": by_map(store.path, place.offset, store.token_count),
    }
    if importlib.util.find_spec("pyarrow") is None:
        print("pyarrow is not installed; it is left out", file=sys.stderr)
    else:
        ways |= dict(arrow_files(folder, store))
    dice = np.random.default_rng(2)
    numbers = dice.integers(0, store.token_count // LENGTH - 1, (WARM_BATCHES, BATCH))
    wanted = ways["store"](numbers[0])
    for name, read in ways.items():
        assert torch.equal(read(numbers[0]), wanted), name
        for batch in numbers:  # into memory
            read(batch)
    found: dict[str, dict[str, list[float]]] = {name: {"clock": [], "computing": []} for name in ways}
    for _ in range(rounds):
        for name, read in ways.items():
            began, computed = time.perf_counter(), time.thread_time()
            for batch in numbers:
                read(batch)
            found[name]["clock"].append((time.perf_counter() - began) / WARM_BATCHES * 1e6)
            found[name]["computing"].append((time.thread_time() - computed) / WARM_BATCHES * 1e6)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the file system to be measured")
    parser.add_argument("--mib", type=int, default=1024, help="of tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_store(folder / "store.h5", args.mib << 19)
        with open_store(folder / "store.h5") as store:
            cold = measure_cold(store, args.rounds)
            warm = measure_warm(folder, store, args.rounds)
    middle = {name: statistics.median(rows) for name, rows in cold.items()}
    for name, rate in middle.items():
        print(f"cold   {name:<34} {rate:9.1f} MiB/s   store / this {middle['store'] / rate:6.2f}")
    for kind in ("clock", "computing"):
        times = {name: statistics.median(rows[kind]) for name, rows in warm.items()}
        for name, micros in times.items():
            print(f"warm   {name:<24} {kind:<9} {micros:9.1f} us/batch   this / store {micros / times['store']:6.2f}")
    if args.json:
        told = {"mib": args.mib, "batch": [BATCH, LENGTH], "cold_mib_per_second": cold, "warm_microseconds": warm}
        args.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
