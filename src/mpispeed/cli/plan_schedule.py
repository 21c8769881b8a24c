"""`mpispeed plan --schedule`: drawing and proof of a pipeline schedule, and its bubble. Needs neither torch nor MPI."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import ConfigError, MpispeedError, ScheduleError

if TYPE_CHECKING:
    from mpispeed.pipe.check import Proof
    from mpispeed.pipe.schedule_base import PipeSchedule
    from mpispeed.pipe.timeline import Timeline

_TIMES = (1.0, 1.0, 1.0)
#: option of the command -> its default; they are of use with --schedule only
_DEFAULTS = {"stages": None, "micro_batches": None, "chunks": None, "times": _TIMES, "png_file": None}


def schedule_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options of a drawing to a click command: `schedule` and the keys of `Asked`."""
    options = [
        click.option(
            "--schedule", metavar="NAME", help="Draw a pipeline schedule instead: 1f1b, gpipe, interleaved, zb-h1."
        ),
        click.option("--stages", type=click.IntRange(min=1), help="With --schedule: ranks of the pipeline."),
        click.option("--micro-batches", type=click.IntRange(min=1), help="With --schedule: of a batch."),
        click.option("--chunks", type=click.IntRange(min=1), help="With --schedule: chunks of layers of each stage."),
        click.option(
            "--times",
            type=float,
            nargs=3,
            default=_TIMES,
            metavar="F I W",
            help="With --schedule: times of the forward pass, and of the gradients of inputs and of weights.",
        ),
        click.option(
            "--png",
            "png_file",
            type=click.Path(path_type=Path, dir_okay=False),
            help="With --schedule: write a picture; needs matplotlib.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def refuse_unused(drawing: dict[str, Any]) -> None:
    """Refuse options of a drawing without `--schedule`."""
    given = [key for key, default in _DEFAULTS.items() if drawing[key] != default]
    if given:
        option = "--" + given[0].removesuffix("_file").replace("_", "-")
        msg = f"{option} says how a pipeline schedule is drawn; give --schedule too"
        raise ConfigError(msg)


def show(name: str, drawing: dict[str, Any], *, as_json: bool) -> None:
    """Print the schedule and exit: 0 it is proved, 1 it does not hold, 2 the question is wrong.

    Args:
        name: of a schedule, or MODULE:CLASS of one's own.
        drawing: what the other options of `schedule_options` gave.
        as_json: print JSON.
    """
    try:
        answer = _answer(name, drawing, as_json=as_json)
    except MpispeedError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error)}))
        click.echo(f"mpispeed plan: {error}", err=True)
        sys.exit(1 if isinstance(error, ScheduleError) else 2)
    click.echo(answer)


def _answer(name: str, drawing: dict[str, Any], *, as_json: bool) -> str:
    from mpispeed.pipe.check import check
    from mpispeed.pipe.timeline import expected_bubble, times

    stages, micro_batches = drawing["stages"], drawing["micro_batches"]
    if stages is None or micro_batches is None:
        msg = (
            "--schedule needs to know for what: give --stages and --micro-batches, such as --stages 4 --micro-batches 8"
        )
        raise ConfigError(msg)
    schedules = _build(name, micro_batches, stages, drawing["chunks"])
    chunks = schedules[0].num_chunks
    proof = check(schedules)
    timeline = times(schedules, *drawing["times"])
    formula = None if ":" in name else expected_bubble(name, micro_batches, stages, chunks, *drawing["times"])
    if drawing["png_file"]:
        from mpispeed.pipe import draw  # of use for this option, and for text

        title = f"{name}, {_parts(stages, micro_batches, chunks)}: {_percent(timeline.bubble_fraction)} idle"
        draw.write_png(drawing["png_file"], timeline, title)
    if as_json:
        return _as_json(name, schedules, proof, timeline, formula)
    return _as_text(name, schedules, proof, timeline, formula)


def _build(name: str, micro_batches: int, stages: int, chunks: int | None) -> list[PipeSchedule]:
    from mpispeed.pipe.schedule import CHUNKED, build

    if ":" in name:
        make, more = _find(name), {} if chunks is None else {"chunks": chunks}
        try:
            return [make(micro_batches, stages, stage, **more) for stage in range(stages)]
        except TypeError as error:
            msg = f"--schedule {name} cannot be made from (micro_batches, stages, stage_id): {error}"
            raise ConfigError(msg) from error
    wanted = chunks or (2 if name.lower() in CHUNKED else 1)
    return [build(name, micro_batches, stages, stage, wanted) for stage in range(stages)]


def _find(name: str) -> Callable[..., PipeSchedule]:
    from mpispeed.pipe.schedule_base import PipeSchedule

    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  as `python -m` does
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module raises
        msg = f"--schedule {name} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    if not (isinstance(found, type) and issubclass(found, PipeSchedule)):
        msg = f"--schedule {name} is {found!r}; expected a class derived from mpispeed.pipe.PipeSchedule"
        raise ConfigError(msg)
    return found


# -- output ------------------------------------------------------------------------------------------------------------


def _parts(stages: int, micro_batches: int, chunks: int) -> str:
    return f"{stages} stages x {micro_batches} micro-batches" + (f" x {chunks} chunks" if chunks > 1 else "")


def _percent(part: Fraction) -> str:
    return f"{100 * float(part):.1f} %"


def _number(value: Fraction) -> str:
    return f"{float(value):.6g}"


def _as_text(
    name: str, schedules: Sequence[PipeSchedule], proof: Proof, timeline: Timeline, formula: Fraction | None
) -> str:
    from mpispeed.pipe import draw

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    heads = ("stage", "idle", "buffers", "live activations", "weight passes held", "messages under way")
    rows = [
        (row.stage, _number(idle), row.buffers, row.peak_live, row.peak_weights, row.peak_messages)
        for row, idle in zip(proof.stages, timeline.bubbles, strict=True)
    ]
    widths = [max(len(head), *(len(str(row[place])) for row in rows)) for place, head in enumerate(heads)]
    table = ["  ".join(str(cell).rjust(size) for cell, size in zip(row, widths, strict=True)) for row in [heads, *rows]]
    closed = "no closed form for these numbers" if formula is None else f"closed form: {_number(formula)} per stage"
    first = schedules[0]
    also = ", ".join(
        words
        for holds, words in (
            (proof.survives_blocking_sends, "also with blocking sends"),
            (proof.survives_barriers, "also with a barrier after every step"),
        )
        if holds
    )
    lines = [
        f"{name}: {_parts(first.num_stages, first.num_micro_batches, first.num_chunks)}",
        "",
        draw.text(timeline, width),
        "",
        *table,
        "",
        f"length {_number(timeline.makespan)}, idle {_percent(timeline.bubble_fraction)}; {closed}",
        f"proved: {proof.messages} messages are received, buffers suffice, no deadlock{', ' + also if also else ''}",
        "F forward, B backward, I gradients of inputs, W of weights; equal stages, messages take no time",
    ]
    return "\n".join(lines)


def _as_json(
    name: str, schedules: Sequence[PipeSchedule], proof: Proof, timeline: Timeline, formula: Fraction | None
) -> str:
    from mpispeed.pipe import draw

    first = schedules[0]
    answer = {
        "ok": True,
        "schedule": name,
        "stages": first.num_stages,
        "micro_batches": first.num_micro_batches,
        "chunks": first.num_chunks,
        "length": float(timeline.makespan),
        "bubble_fraction": float(timeline.bubble_fraction),
        "closed_form": None if formula is None else float(formula),
        "messages": proof.messages,
        "survives_blocking_sends": proof.survives_blocking_sends,
        "survives_barriers": proof.survives_barriers,
        "per_stage": [
            {
                "stage": row.stage,
                "idle": float(idle),
                "buffers": row.buffers,
                "peak_live": row.peak_live,
                "peak_weights": row.peak_weights,
                "peak_held": row.peak_held,
                "peak_messages": row.peak_messages,
                "passes": [
                    {"pass": draw.label(span, 1)[0], "chunk": span.chunk, "micro_batch": span.micro_batch,
                     "start": float(span.start * timeline.unit), "end": float(span.end * timeline.unit)}
                    for span in spans
                ],
            }
            for row, idle, spans in zip(proof.stages, timeline.bubbles, timeline.stages, strict=True)
        ],
    }  # fmt: skip
    return json.dumps(answer, indent=1)
