"""Loading of about 1 GB of weights, beside safetensors' own loading of the same bytes; memory and bytes read.

    python benchmarks/inference/load.py --path FOLDER --json benchmarks/results/inference-load.json

FOLDER is on the file system to measure. Contenders take turns inside every round, in one process of one rank:

- safetensors: `load_file`, which maps the file and reads nothing; the same with every byte read once; the same and
  `load_state_dict` into memory that the model has.
- mpispeed: the same files, and one of our checkpoints with the same weights, whose checksums are compared; with files
  mapped (the default for files of this node) and copied.

"cold" is after the kernel was told to drop the file from its cache. Then jobs of 1, 2 and 4 ranks load slices, each in
fresh processes: the most memory of a rank above that of the process before, and bytes read by all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "step"))


def build(layers: int) -> Any:
    """A LLaMA without values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16, vocab_size=32000
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def write(folder: Path, layers: int) -> None:
    """The weights as safetensors in shards, and as one of our checkpoints."""
    import torch

    from mpispeed.inference.weights import load_weights, save_sharded
    from mpispeed.mesh import start

    world, model = start(), build(layers)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-1, 1)
    model.save_pretrained(folder / "hub", max_shard_size="300MB")
    del model
    model = build(layers)
    load_weights(model, folder / "hub", world.node, world.comm)
    save_sharded(model, folder / "ours", world.comm)
    os.sync()


def drop(folder: Path) -> None:
    """Tell the kernel to forget the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def warm(folder: Path) -> None:
    """Read the files into the cache of the kernel."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass


def contenders(folder: Path, layers: int) -> dict[str, Callable[[], Any]]:
    """Name -> one load; what it returns is kept until the time is taken."""
    from safetensors.torch import load_file

    from mpispeed.inference.weights import load_weights
    from mpispeed.mesh import start

    world, files = start(), sorted((folder / "hub").glob("*.safetensors"))

    def maps() -> Any:
        return {name: tensor for path in files for name, tensor in load_file(path).items()}

    def touches() -> Any:
        found = maps()
        for tensor in found.values():
            tensor.sum()
        return found

    def copies() -> Any:
        model = build(layers).to_empty(device="cpu")
        model.load_state_dict(maps())
        return model

    def ours(kind: str, mapped: bool) -> Callable[[], Any]:
        def load() -> Any:
            model = build(layers)
            load_weights(model, folder / kind, world.node, world.comm, mapped=mapped)
            return model

        return load

    return {
        "safetensors": maps,
        "safetensors, every byte read": touches,
        "safetensors, load_state_dict": copies,
        "mpispeed, safetensors": ours("hub", True),
        "mpispeed, safetensors, copied": ours("hub", False),
        "mpispeed, HDF5": ours("ours", True),
        "mpispeed, HDF5, copied": ours("ours", False),
        "building of the model": lambda: build(layers),
    }


def race(folder: Path, layers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each contender, cold and warm; those that build a model without that time."""
    runs = contenders(folder, layers)
    found: dict[str, dict[str, list[float]]] = {"warm": {}, "cold": {}}
    for _ in range(rounds):
        for state, seconds in found.items():
            for name, run in runs.items():
                if state == "cold":
                    drop(folder)
                else:
                    warm(folder)
                start = time.perf_counter()
                kept = run()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
                del kept
    for seconds in found.values():
        build_seconds = statistics.median(seconds.pop("building of the model"))
        for name in seconds:
            if name.startswith("mpispeed") or name.endswith("load_state_dict"):
                seconds[name] = [value - build_seconds for value in seconds[name]]
    return found


def status(field: str) -> int:
    """A number of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def disk_bytes() -> int:
    """Bytes that this process has had fetched from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def spend(folder: Path, layers: int, kind: str, mapped: bool) -> dict[str, Any]:
    """Memory, bytes and seconds of one load on the ranks of this job, sliced over all of them."""
    import torch

    from mpispeed.inference.slicing import slice_model
    from mpispeed.inference.weights import load_weights
    from mpispeed.mesh import start

    world, model = start(), build(layers)
    slice_model(model, world.comm, without_values=True)
    share = sum(param.numel() * 4 for param in model.parameters())
    if world.rank == 0:
        drop(folder / kind)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world.comm.size))
    Path("/proc/self/clear_refs").write_text("5")
    before, disk = status("VmRSS"), disk_bytes()
    world.comm.barrier()
    begun = time.perf_counter()
    loaded = load_weights(model, folder / kind, world.node, world.comm, mapped=mapped)
    seconds = time.perf_counter() - begun
    for param in model.parameters():
        param.detach().view(-1)[::512].sum()  # mapped pages count when they were touched
    peak = status("VmHWM") - before
    rows = world.comm.gather_objects((share, peak, loaded.bytes_read, disk_bytes() - disk, seconds))
    return {
        "share_bytes": max(row[0] for row in rows),
        "peak_over_share": max(row[1] / row[0] for row in rows),
        "bytes_asked": sum(row[2] for row in rows),
        "disk_bytes": sum(row[3] for row in rows),
        "tensor_bytes": loaded.size_bytes,
        "file_bytes": sum(path.stat().st_size for path in (folder / kind).rglob("*") if path.is_file()),
        "seconds": max(row[4] for row in rows),
    }


def job(ranks: int, options: argparse.Namespace, folder: str, task: str) -> Any:
    """Figures of a task of fresh processes."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        own = [str(Path(__file__)), "--path", folder, "--layers", str(options.layers), "--rounds", str(options.rounds)]
        command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), *own, "--task", task]
        subprocess.run([*command, "--output", output.name], check=True)
        text = Path(output.name).read_text()
        return json.loads(text) if text else None


def perform(options: argparse.Namespace) -> None:
    """One task of a job."""
    from mpispeed.mesh import start

    found: Any = None
    if options.task == "write":
        write(options.path, options.layers)
    elif options.task == "race":
        found = race(options.path, options.layers, options.rounds)
    else:
        kind, way = options.task.split(",")
        found = spend(options.path, options.layers, kind, way == "mapped")
    if start().rank == 0:
        Path(options.output).write_text(json.dumps(found))


def ratios_of(seconds: dict[str, Any]) -> dict[str, float]:
    """Medians of the peers over ours; above 1 is faster."""
    found = {}
    for state, rows in seconds.items():
        for peer in ("safetensors", "safetensors, every byte read", "safetensors, load_state_dict"):
            for name in rows:
                if name.startswith("mpispeed"):
                    ratio = statistics.median(rows[peer]) / statistics.median(rows[name])
                    found[f"{state}: {name}, times as fast as {peer}"] = ratio
    return found


def main() -> None:
    """Run everything and print ratios of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the file system to measure")
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--task", default="", help=argparse.SUPPRESS)
    parser.add_argument("--output", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        perform(options)
        return
    import peers  # torch takes a while, so not for --help

    ways = [(kind, way) for kind in ("hub", "ours") for way in ("copied", "mapped")]
    with tempfile.TemporaryDirectory(dir=options.path, prefix="mpispeed-bench-") as folder:
        job(1, options, folder, "write")
        seconds = job(1, options, folder, "race")
        spent = {
            f"{ranks} ranks, {kind}, {way}": job(ranks, options, folder, f"{kind},{way}")
            for ranks in (1, 2, 4)
            for kind, way in ways
        }
    ratios = ratios_of(seconds)
    for name, value in ratios.items():
        print(f"{value:8.2f}  {name}")
    for name, row in spent.items():
        read = f"{row['bytes_asked']} bytes asked for and {row['disk_bytes']} from disk of {row['tensor_bytes']}"
        print(f"{row['peak_over_share']:8.3f}  peak over share, {name}; {read}")
    shown = {name: getattr(options, name) for name in ("layers", "rounds")}
    peers.write_record(options.json, "inference/load", shown, {"seconds": seconds, "ratios": ratios, "jobs": spent})


if __name__ == "__main__":
    main()
