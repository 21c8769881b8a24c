"""`mpispeed ckpt ls` and `show`. They need neither torch nor MPI."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import format_bytes
from mpispeed.ckpt.tools import ls as listing
from mpispeed.ckpt.tools import packed_weights
from mpispeed.ckpt.tools import show as showing
from mpispeed.cli.ckpt_report import as_json_option, print_table, reported, say
from mpispeed.record.reader import is_record
from mpispeed.record.runs import find_records


@click.command("ls")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@as_json_option
def ls(folder: Path, as_json: bool) -> None:
    """List the checkpoints in DIR; * marks the one that `latest` names."""
    with reported(as_json):
        _refuse_record(folder)
        rows = listing.rows(folder)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        say(f"no tags in {folder}")
        if any(map(is_record, find_records(folder))):
            say(f"it has run records, which are no checkpoints; see them with: mpispeed logs record show {folder}")
        return
    table = [
        (
            "*" if row["is_latest"] else "",
            row["tag"],
            "-" if row["step"] is None else str(row["step"]),
            format_bytes(row["bytes"]),
            (row["created"] or "-")[:19],  # to the second
            _layout_text(row["layout"]),
            row["status"],
        )
        for row in rows
    ]
    print_table(("", "tag", "step", "size", "date", "layout", "status"), table)
    for row in rows:
        if row["status"] == "corrupt" or (row["status"] == "ok" and row["problem"]):
            say(f"{row['tag']}: {row['problem']}", err=True)


@click.command("show")
@click.argument("location", metavar="DIR[:TAG]")
@click.argument("pattern", required=False, default="")
@click.option("--state", "wants_state", is_flag=True, help="Show counters, schedules and client state.")
@click.option("--config", "wants_config", is_flag=True, help="Show the configuration of the run that saved.")
@click.option("--layout", "wants_layout", is_flag=True, help="Show the layout of the ranks that saved.")
@as_json_option
def show(location: str, pattern: str, wants_state: bool, wants_config: bool, wants_layout: bool, as_json: bool) -> None:
    """Describe a checkpoint: its tensors, or with an option its state, configuration or layout.

    TAG defaults to the latest. PATTERN selects names: shell-style, or a part of the name. An HDF5 file of weights that
    `ckpt export` wrote has tensors only.
    """
    with reported(as_json):
        path = showing.split_location(location)[0]
        _refuse_record(path)
        if path.is_file():
            _show_weights(path, pattern, as_json)
            return
        found = showing.open_location(location)
        content: dict[str, Any] = {"tag": found.tag, "step": found.manifest.global_step}
        if not (wants_state or wants_config or wants_layout):
            content["tensors"] = showing.rows(found.index, pattern)
            content["experts"] = showing.expert_rows(found.index, pattern)
        if wants_state:
            content["state"] = showing.state(found)
        if wants_config:
            content["config"] = _parsed(found.config())
        if wants_layout:
            content["layout"] = found.manifest.layout
    if as_json:
        click.echo(json.dumps(content, indent=1))
        return
    if "tensors" in content:
        _print_tensors(content["tensors"])
        _print_experts(content["experts"])
    for part in ("state", "config", "layout"):
        if part in content:
            _print_part(part, content[part])


def _show_weights(path: Path, pattern: str, as_json: bool) -> None:
    """The tensors of a file of weights; those of codes with their bits."""
    rows = [row for row in packed_weights.rows(path) if showing.fits(row.name, pattern)]
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    table = [
        (
            row.name,
            "x".join(map(str, row.shape)) or "scalar",
            row.dtype,
            f"{row.bits} bits" if row.bits else "-",
            f"{row.groups}{', with offsets' if row.has_offsets else ''}" if row.bits else "-",
            format_bytes(row.size_bytes),
        )
        for row in rows
    ]
    print_table(("name", "shape", "dtype", "codes", "scales", "bytes"), table)
    say(f"{len(rows)} rows, {format_bytes(sum(row.size_bytes for row in rows))}")


def _refuse_record(path: Path) -> None:
    """Name the command for run records, which are HDF5 files, too."""
    if path.is_file() and is_record(path):
        msg = f"{path} is a run record and no checkpoint; see it with: mpispeed logs record show {path}"
        raise CheckpointError(msg)


def _print_part(part: str, value: Any) -> None:
    if part == "config":
        for line in (value if isinstance(value, str) else json.dumps(value, indent=2)).splitlines():
            say(line)
        return
    for line in _leaves(value, part):
        say(line)


def _print_tensors(rows: Sequence[dict[str, Any]]) -> None:
    has_experts = any(row["expert"] for row in rows)
    table = [
        (
            row["name"],
            *((_expert_text(row["expert"]),) if has_experts else ()),
            "x".join(map(str, row["shape"])) or "scalar",
            row["dtype"],
            row["kind"],
            row["tp_kind"] or "-",
            "-" if row["group"] in (None, -1) else str(row["group"]),
            ",".join(row["slots"]) or "-",
            format_bytes(row["bytes"]),
        )
        for row in rows
    ]
    names = ("shape", "dtype", "kind", "tp_kind", "group", "slots", "bytes")
    print_table(("name", *(("expert",) if has_experts else ()), *names), table)
    say(f"{len(rows)} rows, {format_bytes(sum(row['bytes'] for row in rows))}")


def _expert_text(expert: Sequence[int] | None) -> str:
    if expert is None:
        return "-"
    return f"all {expert[1]}" if expert[0] < 0 else f"{expert[0]} of {expert[1]}"


def _print_experts(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        say(f"{row['layer']}: {row['experts']} experts, {row['params']} parameters, {format_bytes(row['bytes'])}")


def _layout_text(layout: dict[str, Any] | None) -> str:
    if not layout:
        return "-"
    axes = layout.get("axes", layout)
    items = axes.items() if isinstance(axes, dict) else [("axes", axes)]
    return " ".join(f"{name}={value}" for name, value in items if not isinstance(value, (dict, list)))


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    else:
        yield f"{path} = {json.dumps(value)}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
