"""Writes docs/reference/gpu-figures.md: what ran on which card with which figures, of benchmarks/results/gpu-*.json.

python tools/gpu_figures.py              write the page
python tools/gpu_figures.py --check      fail if the page is not what would be written
python tools/gpu_figures.py --goals DIR  a line for each goal of the records in DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "reference" / "gpu-figures.md"
ENGINE = {"stage 0": 0.02, "stage 3": 0.04}
MEMORY, DISK = 1.6, 1.3
COPY, ADAM = 0.85, 0.90


@dataclass(frozen=True, slots=True)
class Figure:
    """One line: what was measured, what was found, and the goal if there is one."""

    what: str
    found: str
    goal: str = ""
    is_reached: bool | None = None

    def row(self) -> str:
        """Of the page's table."""
        return f"| {self.what} | {self.found} | {self.goal} | {self.verdict} |"

    @property
    def verdict(self) -> str:
        """In a word; empty without a goal."""
        return {True: "reached", False: "missed", None: ""}[self.is_reached]


def _at_most(what: str, value: float, goal: float | None, show: Callable[[float], str], more: str = "") -> Figure:
    if goal is None:
        return Figure(what, show(value) + more)
    return Figure(what, show(value) + more, f"at most {show(goal)}", value <= goal)


def _at_least(what: str, value: float, goal: float, more: str = "") -> Figure:
    return Figure(what, f"{value:.2f}{more}", f"at least {goal:.2f}", value >= goal)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _percent(part: float) -> str:
    return f"{100 * part:+.1f} %"


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _attention(found: Any) -> Iterator[Figure]:
    for row in found["sparse"]:
        name = f"{row['tokens']} tokens in blocks of {row['block']}, forward and backward, dense over ours"
        yield Figure(name, _times(row["dense_over_ours"]))


def _elementwise(found: Any) -> Iterator[Figure]:
    rows = [row for row in found if "part_of_copy" in row]
    yield _share("cases of norms and elementwise work", [row["part_of_copy"] for row in rows])


def _engine(found: Any) -> Iterator[Figure]:
    for row in found:
        goal, time = row.get("target", ENGINE.get(row["side"])), f", {_ms(row['step_seconds'])} a step"
        if goal is None:
            yield Figure(row["side"], time[2:])
        else:
            yield _at_most(f"{row['side']}, more than plain torch", row["overhead"], goal, _percent, time)


def _experts(found: Any) -> Iterator[Figure]:
    for row in found["layers"]:
        times = row["milliseconds"]
        name = f"a layer of {row['experts']} experts, {row['k']} choices, by a loop over by grouped products"
        yield Figure(name, f"{_times(times['loop'] / times['grouped'])}, {times['grouped']:.2f} ms")


def _layer(found: Any) -> Iterator[Figure]:
    for row in found:
        of, ours = f"length {row['sequence']}, dropout {row['dropout']}", row["milliseconds"]["ours"]
        for peer, goal in row["targets"].items():
            yield _at_least(f"{of}, {peer} over ours", row["ratio_to_ours"][peer], goal, f" (ours {ours:.2f} ms)")
        captured = row["milliseconds"].get("ours, captured")
        if captured is not None:
            yield Figure(f"{of}, ours captured in a graph", f"{captured:.2f} ms")


def _offload(found: Any) -> Iterator[Figure]:
    for row in found:
        name, time = row["side"], f", {_ms(row['step_seconds'])}"
        if "over_disk_in_turns" in row:
            yield _at_most(f"{name}, over the disk's own time", row["over_disk_in_turns"], DISK, _times, time)
        elif name.startswith("disk") or name == "plain torch":
            yield Figure(name, time[2:])
        else:
            goal = MEMORY if "optimizer" in name else None
            yield _at_most(f"{name}, over plain torch", row["over_plain"], goal, _times, time)


def _optim(found: Any) -> Iterator[Figure]:
    for name, row in found.items():
        if not isinstance(row, dict):
            continue
        if "fraction of the copy" in row:
            more = f", {row['ours_ms']:.2f} ms"
            part = row["fraction of the copy"]
            what = f"{name}, part of the speed of a copy"
            yield _at_least(what, part, ADAM, more) if name == "adam" else Figure(what, f"{part:.2f}{more}")
        else:
            yield Figure(f"{name}, torch over ours", _times(row["time of torch / time of ours"]))


def _quant(found: Any) -> Iterator[Figure]:
    yield _share("cases of codes, signs and tokens", [row["fraction_of_copy"] for row in found["coders"]])


def _shared(found: Any) -> Iterator[Figure]:
    for row in found:
        name = f"{row['side']}{', ' * bool(row['path'])}{row['path']}"
        if "failed" in row:
            yield Figure(name, "failed", "", False)
        elif "times_one_process" in row:
            time, goal = f", {_ms(row['step_seconds'])}", row.get("target")
            yield _at_most(f"{name}, over one process", row["times_one_process"], goal, _times, time)
        else:
            yield Figure(name, _ms(row["step_seconds"]))


def _softmax(found: Any) -> Iterator[Figure]:
    parts = [part for row in found["softmax"] for part in row["fraction_of_copy"].values()]
    yield _share("cases of softmax, each way", parts)


def _share(what: str, parts: list[float]) -> Figure:
    """How many reach the speed of a copy nearly, and the slowest."""
    count = sum(part >= COPY for part in parts)
    text = f"{count} of {len(parts)}, the slowest {min(parts):.2f}"
    return Figure(f"{what} at {COPY} of a copy's speed or more", text, f"{len(parts)}", count == len(parts))


KINDS: dict[str, Callable[[Any], Iterator[Figure]]] = {
    "attention": _attention, "elementwise": _elementwise, "engine": _engine, "experts": _experts,
    "transformer-layer": _layer, "offload": _offload, "optim": _optim, "quant": _quant, "shared": _shared,
    "softmax": _softmax,
}  # fmt: skip
"""By the name of the record; one that is not here gets a line on its card and no figures."""


def records(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Names and contents, by name."""
    paths = sorted(folder.glob("gpu-*.json"))
    return [(path.stem.removeprefix("gpu-"), json.loads(path.read_text())) for path in paths]


def figures(name: str, record: dict[str, Any]) -> list[Figure]:
    """Those of one record."""
    return list(KINDS[name](record["results"])) if name in KINDS else []


def goals(folder: Path) -> list[str]:
    """A line for each goal."""
    found = ((name, figure) for name, record in records(folder) for figure in figures(name, record))
    rows = [(name, figure) for name, figure in found if figure.is_reached is not None]
    return [f"{figure.verdict}: {name}: {figure.what}: {figure.found} (goal: {figure.goal})" for name, figure in rows]


def page(folder: Path = RESULTS) -> str:
    """The whole page."""
    lines = [
        "# Figures of GPUs",
        "",
        "Made by `python tools/gpu_figures.py` of the records `benchmarks/results/gpu-*.json`, as `make gpu`",
        "writes them. What was found beside them, and what was not tried, is in the",
        "[guide](../guides/gpu.md#run-on-an-h100-and-on-an-h200).",
    ]
    ran = records(folder)
    missing = sorted(set(KINDS) - {name for name, _ in ran})
    if missing:
        lines += ["", f"Not run on a GPU yet: {', '.join(f'`{_script(name)}`' for name in missing)}."]
    for name, record in ran:
        where = f"{record['device']}, {record['date'][:10]}, commit {record['commit'][:8]}, torch {record['torch']}"
        lines += ["", f"## `{_script(name)}`", "", f"{where}.", "", "| what | found | goal | |", "|---|---|---|---|"]
        lines += [figure.row() for figure in figures(name, record)]
    return "\n".join(lines) + "\n"


def _script(name: str) -> str:
    return f"gpu/{name.replace('-', '_')}.py"


def main() -> int:
    """Exit code 1 with `--check` where the page is another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--goals", type=Path, metavar="DIR")
    asked = parser.parse_args()
    if asked.goals:
        print("\n".join(goals(asked.goals)))
        return 0
    if asked.check:
        return int(not PAGE.is_file() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
