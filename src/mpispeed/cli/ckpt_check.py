"""`mpispeed ckpt verify`. It needs neither torch nor MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from mpispeed.base.units import format_bytes
from mpispeed.ckpt.tools import verify as verifying
from mpispeed.ckpt.tools.show import split_location
from mpispeed.ckpt.tools.verify import Report
from mpispeed.cli.ckpt_report import as_json_option, reported

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
        click.echo(f"{report.tag}: {report.status}{_amount(report, quick)}")
        for problem in report.problems[:_SHOWN]:
            click.echo(f"  {problem.text()}")
        if report.problem_count > _SHOWN:
            click.echo(f"  and {report.problem_count - _SHOWN} more problems")
        for name, slot, nan, infinite in report.odd:
            click.echo(f"  {name}/{slot}: {nan} elements are not a number, {infinite} are infinite")
        for note in report.notes:
            click.echo(f"  note: {note}")
        if report.digest:
            click.echo(f"  {report.digest}")


def _amount(report: Report, quick: bool) -> str:
    if not report.tensors:
        return ""
    read = "no elements read" if quick else f"{format_bytes(report.size_bytes)} read"
    return f", {report.files} files, {report.tensors} tensors, {read}"
