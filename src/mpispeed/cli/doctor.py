"""`mpispeed doctor`: usable and missing parts with cures, for one process or all ranks of a job."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from mpispeed.base.site_file import SiteFile
from mpispeed.cli.doctor_page import as_page, as_text
from mpispeed.launch.findings import Finding, Verdict, has_failed
from mpispeed.launch.probes_folder import check_folder
from mpispeed.launch.probes_machine import check_machine
from mpispeed.launch.probes_ranks import Place, check_gpu_memory, check_pair, find_place, look_as_rank
from mpispeed.launch.probes_site import check_site
from mpispeed.launch.probes_slingshot import check_slingshot, find_devices
from mpispeed.launch.probes_slurm import check_slurm
from mpispeed.launch.probes_software import check_software

Check = Callable[[], Iterable[Finding]]


@click.command()
@click.option("--folder", metavar="DIR", help="Folder to look at, such as that of checkpoints; default: this one.")
@click.option("--json", "as_json", is_flag=True, help="Write the findings as JSON.")
@click.option("--html", "page", metavar="FILE", type=click.Path(dir_okay=False), help="Also write a page to FILE.")
@click.pass_context
def doctor(ctx: click.Context, folder: str | None, as_json: bool, page: str | None) -> None:
    """Show what is usable on this machine, what is not, and what to do about it.

    Started by mpirun or srun it looks at all ranks and nodes of the job, and rank 0 reports.

    The exit code is 1 when something is missing that no run can do without.
    """
    place = find_place()
    here = str(Path(folder or os.getcwd()).absolute())  # noqa: PTH109
    if place.size > 1:
        findings = _of_job(place, here, is_asked=folder is not None)
        if place.rank:
            return
    else:
        findings = _alone(here, is_asked=folder is not None)
    title = f"{place.size} ranks" if place.size > 1 else "one process"
    _report(findings, f"mpispeed doctor on {socket.gethostname()}, {title}", as_json, page)
    ctx.exit(int(has_failed(findings)))


def _report(findings: list[Finding], title: str, as_json: bool, page: str | None) -> None:
    if as_json:
        rows = [finding.as_dict() for finding in findings]
        click.echo(json.dumps({"ok": not has_failed(findings), "title": title, "findings": rows}, indent=1))
    else:
        click.echo(as_text(findings))
    if page is not None:
        try:
            Path(page).write_text(as_page(title, findings), encoding="utf-8")
        except OSError as error:
            click.echo(f"mpispeed doctor: the page {page} cannot be written: {error.strerror}", err=True)


def _alone(folder: str, *, is_asked: bool) -> list[Finding]:
    software = examine("software", check_software)
    return [
        *software,
        *examine("machine", check_machine),
        *examine("ranks", check_pair),
        *examine("ranks", lambda: [check_gpu_memory(_has_gpu(software))]),
        *_network(software),
        *examine("folder", lambda: check_folder(folder, is_asked=is_asked)),
        *examine("site", lambda: check_site(os.environ, _count_defaults)),
        *examine("SLURM", lambda: check_slurm(os.environ)),
    ]


def _of_job(place: Place, folder: str, *, is_asked: bool) -> list[Finding]:
    """Findings of the whole job, on rank 0; the first rank of each node looks at the node."""
    own: list[Finding] = []
    if place.local_rank == 0:
        software = examine("software", check_software)
        own = [
            *software,
            *examine("machine", check_machine),
            *examine("ranks", lambda: [check_gpu_memory(_has_gpu(software))]),
            *_network(software),
            *examine("folder", lambda: check_folder(folder, is_asked=is_asked)),
        ]
    found = examine("ranks", lambda: look_as_rank(place, own, folder))
    if place.rank == 0:
        found += examine("site", lambda: check_site(os.environ, _count_defaults))
        found += examine("SLURM", lambda: check_slurm(os.environ))
    return found


def _count_defaults(site: SiteFile) -> int:
    from mpispeed.config.load import flatten  # pydantic: not needed without a site file
    from mpispeed.config.site import translate_site

    return len(flatten(translate_site(site).data))


def _network(software: list[Finding]) -> list[Finding]:
    """Variables of the network; on this node's devices they only matter where there are some."""
    return examine("network", lambda: check_slingshot(find_devices(), os.environ, has_gpu=_has_gpu(software)))


def _has_gpu(software: list[Finding]) -> bool:
    return any(finding.name == "GPU" and finding.verdict is Verdict.OK for finding in software)


def examine(area: str, check: Check) -> list[Finding]:
    """Findings of a check; one that fails itself becomes a finding after those it had, not a traceback."""
    found: list[Finding] = []
    try:
        found.extend(check())
    except Exception as error:  # any error that a strange machine may cause
        what = f"could not be looked at to the end: {type(error).__name__}: {error}"
        found.append(Finding(area, area, Verdict.WARN, what, "tell the authors of mpispeed, with this line"))
    return found
