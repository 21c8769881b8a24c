"""`mpispeed ckpt verify`, `diff` and `tree`. They need neither torch nor MPI."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import click

from mpispeed.base.units import format_bytes, format_list
from mpispeed.ckpt.tools import diff as comparing
from mpispeed.ckpt.tools import tree as objects
from mpispeed.ckpt.tools import verify as verifying
from mpispeed.ckpt.tools.diff import Difference, Row
from mpispeed.ckpt.tools.show import open_location, split_location
from mpispeed.ckpt.tools.verify import Report
from mpispeed.cli.ckpt_report import as_json_option, print_table, reported, say

_SHOWN = 50
_EXIT_CODES = {"ok": 0, "incomplete": 4, "corrupt": 3}


@click.command("verify")
@click.argument("location", metavar="DIR[:TAG]")
@click.option("--quick", is_flag=True, help="Only the manifest, sizes and indices; read no elements.")
@click.option("--all", "wants_all", is_flag=True, help="Check all tags of DIR.")
@click.option("--digest", "wants_digest", is_flag=True, help="Print the logical digest of the tensors too.")
@as_json_option
def verify(location: str, quick: bool, wants_all: bool, wants_digest: bool, as_json: bool) -> None:
    """Check that a checkpoint is what was saved, byte for byte, and name what is not.

    Exit code 3: something is damaged or missing; 4: the save never finished.
    """
    with reported(as_json):
        if wants_all:
            folder, tag = split_location(location)
            if tag is not None:
                msg = "--all checks all tags of DIR; leave the tag out"
                raise click.UsageError(msg)
            reports = verifying.verify_all(folder, quick=quick, wants_digest=wants_digest)
        else:
            reports = [verifying.verify_location(location, quick=quick, wants_digest=wants_digest)]
    worst = max((_EXIT_CODES[report.status] for report in reports), key=[0, 4, 3].index)
    if as_json:
        rows = [report.as_row() for report in reports]
        click.echo(json.dumps({"ok": worst == 0, "checkpoints": rows} if wants_all else {"ok": worst == 0} | rows[0]))
    else:
        _print(reports, quick)
    if worst:
        click.get_current_context().exit(worst)


def _print(reports: Sequence[Report], quick: bool) -> None:
    for report in reports:
        say(f"{report.tag}: {report.status}{_amount(report, quick)}")
        for problem in report.problems[:_SHOWN]:
            say(f"  {problem.text()}")
        if report.problem_count > _SHOWN:
            say(f"  and {report.problem_count - _SHOWN} more problems")
        for name, slot, nan, infinite in report.odd:
            say(f"  {name}/{slot}: {nan} elements are not a number, {infinite} are infinite")
        for note in report.notes:
            say(f"  note: {note}")
        if report.digest:
            say(f"  {report.digest}")


def _amount(report: Report, quick: bool) -> str:
    if not report.tensors:
        return ""
    read = "no elements read" if quick else f"{format_bytes(report.size_bytes)} read"
    return f", {report.files} files, {report.tensors} tensors, {read}"


def _tolerance(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not (value >= 0 and math.isfinite(value)):
        msg = f"{value} is no tolerance; give a number of at least 0"
        raise click.BadParameter(msg, context, parameter)
    return value


@click.command("diff")
@click.argument("first", metavar="A[:TAG]")
@click.argument("second", metavar="B[:TAG]")
@click.option("--rtol", type=float, default=0.0, callback=_tolerance, help="Equal if apart by no more than this x |B|.")
@click.option("--atol", type=float, default=0.0, callback=_tolerance, help="Equal if apart by no more than this.")
@click.option(
    "--slots", metavar="SLOT,...", multiple=True, help="Compare these slots only, such as master; repeatable."
)
@click.option("--state", "wants_state", is_flag=True, help="Compare state, configuration and attributes too.")
@click.option("--bits", "by_bits", is_flag=True, help="Compare dtypes, bytes, and the state of engine and optimizer.")
@as_json_option
def diff(
    first: str,
    second: str,
    rtol: float,
    atol: float,
    slots: tuple[str, ...],
    wants_state: bool,
    by_bits: bool,
    as_json: bool,
) -> None:
    """Tell in what two checkpoints differ; exit code 1 if they do.

    Elements are compared by value: another dtype with the same values is no difference. With --bits it is one; time,
    writers, random states and what else belongs to ranks is none.
    """
    if by_bits and (rtol or atol):
        msg = "--bits compares without tolerances; leave --rtol and --atol out"
        raise click.UsageError(msg)
    wanted = {slot for text in slots for slot in text.split(",") if slot}
    with reported(as_json), open_location(first) as mine, open_location(second) as theirs:
        known = {slot for reader in (mine, theirs) for _, slot in reader.index.tensors}
        if wanted - known:
            some = ", ".join(sorted(known))
            msg = f"neither checkpoint has a slot {', '.join(sorted(wanted - known))}; they have {some}"
            raise click.UsageError(msg)
        found = comparing.diff(
            mine, theirs, rtol=rtol, atol=atol, slots=wanted, wants_state=wants_state, by_bits=by_bits
        )
    if as_json:
        click.echo(json.dumps(found.as_row(), indent=1))
    else:
        _print_difference(found)
    if not found.is_equal:
        click.get_current_context().exit(1)


def _print_difference(found: Difference) -> None:
    for sign, names in (("-", found.removed), ("+", found.added)):
        for name in names:
            say(f"{sign} {name}")
    table = [_cells(row) for row in found.rows if row.change != "equal" or row.dtypes[0] != row.dtypes[1]]
    if table:
        print_table(
            ("name", "slot", "change", "equal", "max abs", "max rel", "max ulp", "nan", "dtype", "shape"), table
        )
    for layer, total, numbers in found.experts:
        say(f"experts of {layer} that differ: {format_list(map(str, numbers), _SHOWN)} of {total}")
    for path, mine, theirs in found.state:
        say(f"{path}: {mine} -> {theirs}")
    if found.state_count > len(found.state):
        say(f"and {found.state_count - len(found.state)} more differences of the state")
    same = sum(row.change == "equal" for row in found.rows)
    say(f"{same} of {len(found.rows)} tensors are equal")


def _cells(row: Row) -> tuple[str, ...]:
    own = row.tally
    values = ("-",) * 5
    if own:
        share = 100 * own.equal / max(1, own.numel)
        # 100 % is said of all elements only
        part = f"{share:.2f} %" if own.equal == own.numel or share < 99.995 else "<100 %"
        ulp = "-" if own.max_ulp is None else str(own.max_ulp)
        values = (part, f"{own.max_abs:.3g}", f"{own.max_rel:.3g}", ulp, str(own.nan))
    dtypes, shapes = (
        pair[0] if pair[0] == pair[1] else " -> ".join(pair)
        for pair in (row.dtypes, tuple("x".join(map(str, shape)) or "scalar" for shape in row.shapes))
    )
    return (row.name, row.slot, row.change, *values, dtypes, shapes)


@click.command("tree")
@click.argument("location", metavar="DIR[:TAG]|FILE")
@as_json_option
def tree(location: str, as_json: bool) -> None:
    """List the HDF5 objects of a checkpoint's files, or of one file; follows no link.

    It checks nothing, so it also shows what a damaged or unfinished checkpoint has.
    """
    with reported(as_json):
        rows = objects.rows(location)
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    file = ""
    for row in rows:
        if row["file"] != file:
            file = row["file"]
            say(file)
        say(f"  {row['path']}  {objects.text_of(row)}")
        for name, value in row["attributes"].items():
            say(f"    @{name} = {json.dumps(value)}")
