"""Speed-up and efficiency of a scaling study: rows from the results of its runs, as table, CSV and picture."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mpispeed.base.errors import UsageError
from mpispeed.base.plotting import picture

WIDTH_INCHES, HEIGHT_INCHES = 9.0, 3.8


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a study: seconds of each step, the first ones too, and samples of a step over all ranks."""

    ranks: int
    samples_per_step: int
    step_seconds: tuple[float, ...]
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """Results for one number of ranks.

    Attributes:
        ranks: their number.
        threads: of each rank, 0 if unknown.
        samples_per_step: over all ranks.
        runs, steps: numbers of runs, and of all their steps that counted.
        step_seconds: the median over runs of the median over steps.
        low_seconds, high_seconds: least and largest of the runs' medians; for one run its quartiles.
        samples_per_second: by `step_seconds`.
        speedup: samples per second by those of the smallest size.
        efficiency: the speed-up divided by the ratio of ranks.
        efficiency_low, efficiency_high: with the spread of both sizes, in the worst and the best case.
        serial_part: part of a step of the smallest size that did not get faster (strong scaling; by Karp and Flatt).
    """

    ranks: int
    threads: int
    samples_per_step: int
    runs: int
    steps: int
    step_seconds: float
    low_seconds: float
    high_seconds: float
    samples_per_second: float
    speedup: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    serial_part: float | None


def read_run(path: Path) -> Run:
    """Read the results of a run.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text())
        seconds = tuple(map(float, found["step_seconds"]))
        return Run(int(found["ranks"]), int(found["samples_per_step"]), seconds, int(found.get("threads", 0)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{path} is no result of a scaling run: {error}"
        raise UsageError(msg) from error


def rows_of(runs: Iterable[Run], mode: str, skip: int) -> list[Row]:
    """Return a row for each number of ranks; the first `skip` steps of each run do not count.

    Raises:
        UsageError: a run was too short, or the batches are not those of this mode.
    """
    by_ranks: dict[int, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.ranks):
        by_ranks.setdefault(run.ranks, []).append(run)
    if not by_ranks:
        msg = "no run has written a result; does the script train with mpispeed.initialize, and end its steps?"
        raise UsageError(msg)
    _check_batches(by_ranks, mode)
    times = {ranks: _spread(group, skip) for ranks, group in by_ranks.items()}
    first = next(iter(by_ranks))
    rows = []
    for ranks, group in by_ranks.items():
        middle, low, high, steps = times[ranks]
        batch, factor = group[0].samples_per_step, ranks / first
        work = batch / by_ranks[first][0].samples_per_step  # times more than the smallest size does in a step
        speedup = work * times[first][0] / middle
        rows.append(
            Row(
                ranks, group[0].threads, batch, len(group), steps, middle, low, high, batch / middle, speedup,
                speedup / factor, work * times[first][1] / high / factor, work * times[first][2] / low / factor,
                _serial_part(speedup, factor) if mode == "strong" else None,
            )
        )  # fmt: skip
    return rows


def _check_batches(by_ranks: dict[int, list[Run]], mode: str) -> None:
    """Strong scaling keeps the batch of all ranks, weak scaling that of each."""
    shares = {
        ranks: {run.samples_per_step / (ranks if mode == "weak" else 1) for run in group}
        for ranks, group in by_ranks.items()
    }
    if len(set().union(*shares.values())) > 1:
        found = ", ".join(f"{group[0].samples_per_step} on {ranks}" for ranks, group in by_ranks.items())
        kept = "the batch of each rank" if mode == "weak" else "the batch of all ranks"
        msg = (
            f"{mode} scaling keeps {kept}, and the script trained with batches of {found} ranks; give the config as a "
            "file (--deepspeed_config), so that it can be written for each size, or choose the other --mode"
        )
        raise UsageError(msg)


def _spread(group: Sequence[Run], skip: int) -> tuple[float, float, float, int]:
    """(median, low, high, steps that counted) of the runs of one size."""
    kept = [run.step_seconds[skip:] for run in group]
    short = min(map(len, kept))
    if short < 2:
        msg = (
            f"a run on {group[0].ranks} ranks had {short + skip if short else min(len(r.step_seconds) for r in group)} "
            f"steps, of which the first {skip} do not count; train for more steps, or skip fewer (--skip)"
        )
        raise UsageError(msg)
    medians = [statistics.median(seconds) for seconds in kept]
    if len(medians) > 1:
        low, high = min(medians), max(medians)
    else:
        low, _, high = statistics.quantiles(kept[0], n=4, method="inclusive")
    return statistics.median(medians), low, high, sum(map(len, kept))


def _serial_part(speedup: float, factor: float) -> float | None:
    return (1 / speedup - 1 / factor) / (1 - 1 / factor) if factor > 1 else None


def table(rows: Sequence[Row], mode: str) -> str:
    """The rows for people."""
    head = ["ranks", "threads", "batch", "runs", "steps", "step s", "spread", "samples/s", "speed-up", "efficiency", ""]
    head += ["serial part"] if mode == "strong" else []
    lines = [head]
    for row in rows:
        spread = f"{row.low_seconds:.4g}..{row.high_seconds:.4g}"
        cells = [row.ranks, row.threads or "?", row.samples_per_step, row.runs, row.steps, f"{row.step_seconds:.4g}"]
        cells += [spread, f"{row.samples_per_second:.4g}", f"{row.speedup:.2f}", f"{100 * row.efficiency:.0f} %"]
        cells.append(f"({100 * row.efficiency_low:.0f}..{100 * row.efficiency_high:.0f})")
        if mode == "strong":
            is_part = row.serial_part is not None and 0 <= row.serial_part <= 1  # not where it gets slower or leaps
            cells.append(f"{100 * (row.serial_part or 0):.0f} %" if is_part else "")
        lines.append(list(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The rows with all digits, one column for each field of `Row`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def draw(path: Path, rows: Sequence[Row], mode: str, title: str) -> None:
    """Samples per second beside the ideal, and efficiency with its spread.

    Raises:
        UsageError: matplotlib is not installed.
    """
    ranks = [row.ranks for row in rows]
    speeds = [row.samples_per_second for row in rows]
    with picture(path, WIDTH_INCHES, HEIGHT_INCHES, layout="constrained") as figure:
        figure.suptitle(f"{mode} scaling: {title}".replace("$", r"\$"), fontsize=10)
        left, right = figure.subplots(1, 2)
        left.plot(ranks, [speeds[0] * count / ranks[0] for count in ranks], "--", color="gray", label="ideal")
        left.plot(ranks, speeds, "o-", label="measured")
        left.set(xlabel="ranks", ylabel="samples per second", xscale="log", yscale="log")
        left.legend()
        middle = [100 * row.efficiency for row in rows]
        below = [100 * max(0.0, row.efficiency - row.efficiency_low) for row in rows]
        above = [100 * max(0.0, row.efficiency_high - row.efficiency) for row in rows]
        right.axhline(100, linestyle="--", color="gray")
        right.errorbar(ranks, middle, yerr=[below, above], fmt="o-", capsize=4)
        right.set(xlabel="ranks", ylabel="efficiency, %", xscale="log", ylim=(0, max(110.0, 1.1 * max(middle))))
        for axes in (left, right):
            axes.set_xticks(ranks, [str(count) for count in ranks])
            axes.minorticks_off()
