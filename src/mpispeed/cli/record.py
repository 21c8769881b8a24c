"""`mpispeed logs record`: what runs did, by their records. No command needs torch or MPI, but for exports that do.

Exit codes: 0 fine (`compare`: equal), 1 `compare`: different, 2 usage, or a file that is no run record or is damaged.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes, format_duration
from mpispeed.cli.ckpt_report import as_json_option, print_table, say
from mpispeed.cli.record_export import export
from mpispeed.record.compare import Comparison, compare, is_loss, panels
from mpispeed.record.errors import RecordError
from mpispeed.record.export import selected
from mpispeed.record.plot import Curve, Panel, text_plot, write_png
from mpispeed.record.runs import STEP_SECONDS, Run, open_run
from mpispeed.record.summary import RUNNING, state_of, strict, summary, when
from mpispeed.record.told_facts import fact_lines

_MOST_PANELS = 8
_MOST_CURVES = 16
_MOST_DIFFERENCES = 40
_MOST_NOTES = 20
_FOLLOW_SECONDS = 2.0
_SECONDS = (STEP_SECONDS, "Step/update_seconds")

_sources = click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
_png = click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write a PNG; needs matplotlib."
)
_series = click.option(
    "--series", "patterns", multiple=True, help="Names of series: shell-style, or a part of the name; repeatable."
)


@click.group()
def record() -> None:
    """What runs did, by the records that they wrote.

    SOURCES are files, or folders with the files of a run's jobs, which are put in the order of time.
    """


record.add_command(export)


@record.command("show")
@_sources
@_series
@click.option("--rank", type=click.IntRange(min=0), help="With --series, of this rank only.")
@click.option("--fact", "fact", help="Print one of the facts known at the start, such as config, as JSON.")
@click.option("--follow", is_flag=True, help="With --series, go on with new points until the run ends.")
@as_json_option
def show(
    sources: tuple[Path, ...],
    patterns: tuple[str, ...],
    rank: int | None,
    fact: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show what a run is, whether it ended, its series, how ranks differ, and what happened.

    With --series, print the points of series, as lines of step, samples, time, rank and value.
    """
    run = open_run(sources)
    if fact is not None:
        if fact not in run.facts:
            msg = f"{run.last.path} has no fact {fact!r:.60}; it has {', '.join(run.facts) or 'none'}"
            raise RecordError(msg)
        click.echo(json.dumps(strict(run.facts[fact]), indent=1))
    elif patterns:
        _print_points(run, patterns, rank, as_json=as_json, head=True)
        if follow:
            _follow(sources, run, patterns, rank, as_json)
    elif follow or rank is not None:
        msg = "--follow and --rank are of use with --series, for points"
        raise UsageError(msg)
    elif as_json:
        click.echo(json.dumps(strict({**summary(run, time.time()), "facts": run.facts}), indent=1, allow_nan=False))
    else:
        _print_summary(run)


def _print_summary(run: Run) -> None:
    found = summary(run, time.time())
    for job in found["jobs"]:
        steps = f"steps {job['first_step']}-{job['last_step']}" if job["last_step"] else "no step"
        say(f"{job['file']}  started {when(job['started'])} on {job['host'] or '?'}  {steps}  {job['state']}")
    lines = [("state", found["said"]), *(("lost", sentence) for sentence in found["lost"]), *fact_lines(run.facts)]
    lines.append(("steps", f"{found['steps']}, {found['samples']} samples"))
    if found["seconds_per_step"] is not None:
        lines.append(("speed", f"{format_duration(found['seconds_per_step'])} per step (median)"))
    if found["repeated"]:
        text = f"{found['repeated']} points are of steps that a later job did again, and are left out"
        lines.append(("repeated", text))
    for label, text in lines:
        say(f"{label:<10} {text}")
    _print_tables(found)


def _print_tables(found: dict[str, Any]) -> None:
    if found["series"]:
        click.echo()
        heads = ("series", "ranks", "points", "steps", "first", "last", "min", "max", "mean of last tenth")
        print_table(heads, [_series_cells(row) for row in found["series"]])
    if found["ranks"]:
        click.echo()
        by_rank = ("series, median by rank", "ranks", "of all", "lowest", "rank", "highest", "rank")
        print_table(by_rank, [_spread_cells(row) for row in found["ranks"]])
    if found["slowest"]:
        rank, own, others = (found["slowest"][name] for name in ("rank", "seconds", "median"))
        say(f"rank {rank} has the most to do: {own:.4g} s of a step, the median is {others:.4g} s")
    if found["traffic"]:
        click.echo()
        print_table(("communication", "axes", "calls", "bytes", "seconds"), list(map(_traffic_cells, found["traffic"])))
    if found["notes"]:
        click.echo()
        _print_notes(found["notes"])


def _series_cells(row: dict[str, Any]) -> tuple[str, ...]:
    odd = f" ({row['not_finite']} not finite)" if row["not_finite"] else ""
    steps = f"{row['first_step']}-{row['last_step']}"
    values = tuple(f"{row[name]:.6g}" for name in ("first", "last", "min", "max", "tail"))
    return (row["series"], str(row["ranks"]), f"{row['points']}{odd}", steps, *values)


def _spread_cells(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = f"{row['lowest']:.6g}", f"{row['highest']:.6g}"
    ranks = (low, str(row["lowest_rank"]), high, str(row["highest_rank"]))
    return (row["series"], str(row["ranks"]), f"{row['median']:.6g}", *ranks)


def _traffic_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (row["verb"], row["axes"], f"{row['calls']:.0f}", format_bytes(row["bytes"]), f"{row['seconds']:.4g}")


def _print_notes(notes: Sequence[dict[str, Any]]) -> None:
    if len(notes) > _MOST_NOTES:
        say(f"notes: the last {_MOST_NOTES} of {len(notes)}; all of them with --json")
    rows = []
    for note in notes[-_MOST_NOTES:]:
        rest = {key: value for key, value in note.items() if key not in ("time", "kind")}
        text = ", ".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in rest.items()
        )
        rows.append((when(note["time"]), note["kind"], printable(text, 200)))
    print_table(("time", "note", ""), rows)


def _print_points(
    run: Run, patterns: Sequence[str], rank: int | None, *, as_json: bool, head: bool, after: int = 0
) -> None:
    """Print the points of the rows from `after` on, in the order in which they were written."""
    names = _chosen(run, patterns)
    if as_json:
        for line in _point_rows(run, names, rank, after):
            click.echo(json.dumps(strict(line), allow_nan=False))
        return
    if head:
        click.echo("step\tsamples\ttime\trank\tvalue\tseries")
    for line in _point_rows(run, names, rank, after):
        shown = (str(line[name]) for name in ("step", "samples", "time", "rank", "value", "series"))
        click.echo("\t".join(map(printable, shown)))


def _point_rows(run: Run, names: Sequence[str], rank: int | None, after: int) -> list[dict[str, Any]]:
    wanted = set(names)
    return [
        {"series": run.names[series], "rank": own, "step": step, "samples": samples, "time": seconds, "value": value}
        for series, own, step, samples, seconds, value in run.rows[after:].tolist()
        if run.names[series] in wanted and rank in (None, own)
    ]


def _follow(sources: Sequence[Path], run: Run, patterns: Sequence[str], rank: int | None, as_json: bool) -> None:
    """Print new points until the run is no longer running."""
    shown = len(run.rows)
    while state_of(run.last, time.time())[0] == RUNNING:
        sys.stdout.flush()
        time.sleep(_FOLLOW_SECONDS)
        run = open_run(sources)
        _print_points(run, patterns, rank, as_json=as_json, head=False, after=shown)
        shown = len(run.rows)


def _chosen(run: Run, patterns: Sequence[str]) -> list[str]:
    names = [info.name for info in run.series()]
    found = selected(names, patterns)
    if not found:
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        msg = f"no series fits {', '.join(patterns)}; there are: {shown or 'none'}"
        raise RecordError(msg)
    return found


@record.command("plot")
@_sources
@_series
@click.option("--x", "x_axis", type=click.Choice(["step", "samples", "time"]), default="step", show_default=True)
@click.option("--ranks", "all_ranks", is_flag=True, help=f"A curve for each rank, at most {_MOST_CURVES}.")
@_png
def plot(
    sources: tuple[Path, ...], patterns: tuple[str, ...], x_axis: str, all_ranks: bool, output: Path | None
) -> None:
    """Draw series, by default the losses: with -o as a picture, else in characters."""
    run = open_run(sources)
    names = _chosen(run, patterns) if patterns else _losses(run)
    if len(names) > _MOST_PANELS:
        say(f"the first {_MOST_PANELS} of {len(names)} series are drawn", err=True)
    ranks = {info.name: info.ranks for info in run.series()}
    drawn = [
        Panel(name, _curves(run, name, ranks[name] if all_ranks else ranks[name][:1], x_axis), _X_LABELS[x_axis])
        for name in names[:_MOST_PANELS]
    ]
    _draw(drawn, output, ", ".join(map(str, sources)))


_X_LABELS = {"step": "step", "samples": "samples", "time": "hours since the start"}


def _losses(run: Run) -> list[str]:
    names = [info.name for info in run.series()]
    found = [name for name in names if is_loss(name)] or names[:1]
    if not found:
        msg = f"{run.last.path} has no points yet"
        raise RecordError(msg)
    return found


def _curves(run: Run, name: str, ranks: Sequence[int], x_axis: str) -> list[Curve]:
    found = []
    for rank in ranks[:_MOST_CURVES]:
        points = run.points(name, rank)
        x = (points.time - run.records[0].started) / 3600 if x_axis == "time" else getattr(points, x_axis)
        found.append(Curve(f"rank {rank}", x, points.value))
    return found


def _draw(drawn: Sequence[Panel], output: Path | None, title: str) -> None:
    if output is None:
        for number, panel in enumerate(drawn):
            click.echo("\n" * bool(number), nl=False)
            for line in text_plot(panel):
                click.echo(line)
        return
    try:
        write_png(output, drawn, title)
    except OSError as failure:
        msg = f"{output} cannot be written: {failure.strerror}"
        raise UsageError(msg) from failure
    say(f"{output}: {len(drawn)} series")


@record.command("compare")
@click.argument("one", metavar="A", type=click.Path(path_type=Path))
@click.argument("other", metavar="B", type=click.Path(path_type=Path))
@_series
@_png
@as_json_option
def compare_(one: Path, other: Path, patterns: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Tell in what two runs differ: what was known at the start, losses bit by bit, times of steps.

    Exit code 0 if the losses (or the series that are named) have the same steps and bits, else 1.
    """
    runs = open_run([one]), open_run([other])
    names = sorted({name for run in runs for name in selected([info.name for info in run.series()], patterns)})
    if patterns and not names:
        msg = f"no series fits {', '.join(patterns)}"
        raise RecordError(msg)
    found = compare(*runs, names if patterns else (), _SECONDS)
    if as_json:
        click.echo(json.dumps(strict(found.as_json()), indent=1, allow_nan=False))
    else:
        _print_comparison(found, runs)
    drawn = panels(*runs, [each.name for each in found.series[:_MOST_PANELS]], (f"A {one}", f"B {other}"))
    if output is not None or not as_json:
        _draw(drawn, output, "")
    sys.exit(0 if found.is_equal else 1)


def _print_comparison(found: Comparison, runs: tuple[Run, Run]) -> None:
    for label, run in zip("AB", runs, strict=True):
        for sentence in run.lost:
            say(f"lost in {label}  {sentence}")
    if found.facts:
        cells = [(name, *(printable(json.dumps(value), 60) for value in pair)) for name, *pair in found.facts]
        print_table(("fact", "A", "B"), cells[:_MOST_DIFFERENCES])
        if len(cells) > _MOST_DIFFERENCES:
            say(f"and {len(cells) - _MOST_DIFFERENCES} more; all of them with --json")
    else:
        say("facts      the same")
    say(f"steps      {found.steps[0]} and {found.steps[1]}")
    for name, first, second in found.seconds:
        ratio = f", B takes {second / first:.3f} of A" if first > 0 else ""
        say(f"median     {name}: {first:.6g} and {second:.6g}{ratio}")
    for each in found.series:
        only = f", {each.only[0]} steps only in A, {each.only[1]} only in B" if any(each.only) else ""
        values = f"last {each.last[0]!r} and {each.last[1]!r}"
        if each.is_equal:
            said = f"equal in every bit at {each.common} steps, {values}"
        elif each.different:
            said = (
                f"different at {each.different} of {each.common} common steps, first at step {each.first_different}, "
            )
            said += f"by at most {each.furthest:.3g}, {values}{only}"
        else:
            said = f"equal at {each.common} common steps, {values}{only}"
        say(f"{each.name}: {said}")
    if not found.series:
        say("no losses to compare; name series with --series")
