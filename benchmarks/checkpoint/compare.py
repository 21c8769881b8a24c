"""Saving and loading about 1 GB of training state, beside torch.save, torch's distributed checkpoint and safetensors.

    python benchmarks/checkpoint/compare.py --path FOLDER --json benchmarks/results/checkpoint.json

Starts jobs on FOLDER's file system: one of 2 ranks that saves with every contender in turns (`contenders.py`), then
jobs of 1, 2 and 3 ranks in turns that load what it left (`loads.py`). Every contender writes the same number of bytes
and brings them to the disk (fsync). "raw" is the limit: both ranks write their half of the same bytes into one file
whose space is reserved, with fsync and without anything else, through the page cache and past it. "copy" is one copy
of the same bytes in memory, the limit for the stall of an asynchronous save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "step"))


def start(ranks: int, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script on so many ranks; its figures, which rank 0 writes into a file."""
    with tempfile.NamedTemporaryFile(suffix=".json") as output:
        command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), str(HERE / script), *arguments]
        subprocess.run([*command, "--output", output.name], check=True)
        figures: dict[str, Any] = json.loads(Path(output.name).read_text())
        return figures


def median(values: list[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def summary(saves: dict[str, Any], loads: dict[str, list[float]]) -> dict[str, float]:
    """Ratios that the figures are taken for; above 1 is faster than the limit or the peer."""
    ours, stalls = median(saves["seconds"]["mpispeed"]), saves["stalls"]["mpispeed, async"][1:]
    found = {f"speed of {name}": median(seconds) / ours for name, seconds in saves["seconds"].items()}
    found = {name.replace("speed of", "save, times as fast as"): value for name, value in found.items()}
    found["stall of a save in the background from the second on, in memory copies"] = median(stalls) / median(
        saves["seconds"]["copy"]
    )
    found["stall of torch's distributed checkpoint in the background, in memory copies"] = median(
        saves["stalls"]["torch DCP, async"][1:]
    ) / median(saves["seconds"]["copy"])
    for ranks, seconds in loads.items():
        found[f"load on {ranks} ranks, in loads on 2"] = median(seconds) / median(loads["2"])
    return found


def main() -> None:
    """Run everything and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a folder on the file system to measure")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    import peers  # torch takes a while, so not for --help

    size = ["--width", str(options.width), "--layers", str(options.layers)]
    with tempfile.TemporaryDirectory(dir=options.path, prefix="mpispeed-bench-") as folder:
        saves = start(2, "contenders.py", folder, *size, "--rounds", str(options.rounds))
        loads: dict[str, list[float]] = {"1": [], "2": [], "3": []}
        for _ in range(2):
            for ranks in loads:
                loads[ranks] += start(int(ranks), "loads.py", folder, *size)["seconds"]
    ratios = summary(saves, loads)
    for name, value in ratios.items():
        print(f"{value:6.2f}  {name}")
    print(f"{saves['bytes'] / 1e6:.0f} MB of elements; files: {saves['files']}")
    results = {"saves": saves, "load_seconds": loads, "ratios": ratios}
    shown = {name: getattr(options, name) for name in ("width", "layers", "rounds")}
    peers.write_record(options.json, "checkpoint/compare", shown, results)


if __name__ == "__main__":
    main()
