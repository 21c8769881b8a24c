"""The compressed all-reduce beside MPI's own over slow links between two hosts, in one run.

    python benchmarks/network/compare.py --json benchmarks/results/network.json

Start it without mpirun, as root: it makes two hosts on this machine (`hosts.py`), lets one rank on each run
`exchange.py` once for every rate, and removes them. Figures are medians over rounds in which all take turns, ratios to
MPI's fp32 all-reduce of the same values, and shares of the time in which the wire, by its speed in a plain message both
ways, moves the bytes that the contender itself has to send.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import exchange
import hosts

sys.path.insert(0, str(Path(__file__).parent.parent / "step"))
import peers
from turns import spread

BASE = "mpi"


def run_rate(options: argparse.Namespace, joined: hosts.Hosts, rate: str) -> dict[str, Any]:
    """What the ranks measured over links of this rate."""
    joined.limit(rate)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        words = ["--mib", str(options.mib), "--rounds", str(options.rounds), "--json", str(path)]
        status = joined.run([exchange.__file__, *words, "--only", *options.only], 1, options.timeout)
        if status:
            sys.exit(f"compare: the job at {rate} ended with {status}")
        figures: dict[str, Any] = json.loads(path.read_text())
    seconds = {name: of_one["seconds"] for name, of_one in figures.items()}
    wire = figures["wire"]
    bytes_per_second = wire["journal"] / statistics.median(wire["seconds"])
    for name, of_one in figures.items():
        ratio, by_round = peers.speed_ratios(seconds, BASE, name)
        of_one["ratio_to_mpi"], of_one["median_of_round_ratios"] = ratio, by_round
        of_one["share_of_wire"] = of_one["journal"] / bytes_per_second / statistics.median(of_one["seconds"])
    return figures


def report(rate: str, figures: dict[str, Any]) -> None:
    """Print the table of one rate."""
    wire = figures["wire"]
    speed = wire["journal"] * 8 / statistics.median(wire["seconds"]) / 1e6
    print(f"\n{rate}: a plain message each way at {speed:.1f} Mbit/s")
    print(f"{'':12s}{'seconds':>10s}{'x mpi':>9s}{'by round':>10s}{'of wire':>9s}{'journal MB':>12s}{'device MB':>11s}")
    for name, of_one in figures.items():
        times = of_one["seconds"]
        print(
            f"{name:12s}{statistics.median(times):10.4f}{of_one['ratio_to_mpi']:9.2f}"
            f"{of_one['median_of_round_ratios']:10.2f}{of_one['share_of_wire']:9.0%}"
            f"{of_one['journal'] / 1e6:12.3f}{of_one['device'] / 1e6:11.3f}   spread {spread(times):.0%}"
        )


def main() -> None:
    """Measure all rates and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="as tc writes them, or none")
    parser.add_argument("--mib", type=float, default=64, help="size of the fp32 values")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which the job of a rate is ended")
    parser.add_argument("--only", nargs="+", choices=exchange.CONTENDERS, default=[], help="beside wire and mpi")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    wanted = options.only or exchange.CONTENDERS
    options.only = [name for name in exchange.CONTENDERS if name in ("wire", BASE) or name in wanted]
    measured = {}
    print(f"{options.mib:g} MiB of fp32 values, 2 hosts of 1 rank, {options.rounds} rounds")
    with hosts.joined_hosts(2) as joined:
        for rate in options.rates:
            measured[rate] = run_rate(options, joined, rate)
            report(rate, measured[rate])
    settings = {name: getattr(options, name) for name in ("rates", "mib", "rounds", "only")}
    peers.write_record(options.json, "network/compare", {**settings, "ranks": 2}, measured)


if __name__ == "__main__":
    main()
