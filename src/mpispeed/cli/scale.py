"""`mpispeed scale`: run or submit a script on several numbers of ranks; table, CSV and picture of its scaling."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.launch.scale import Case


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--ranks", default="1,2,4", show_default=True, help="Numbers of ranks, the smallest is the reference.")
@click.option("--mode", type=click.Choice(["strong", "weak"]), default="strong", show_default=True,
              help="strong: the batch of all ranks stays; weak: that of each rank stays.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Runs of each size.")
@click.option("--skip", type=click.IntRange(min=0), default=3, show_default=True, help="First steps not to count.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the study goes; default: a new one in runs/.")
@click.option("--collect", type=click.Path(path_type=Path), metavar="FOLDER", help="Only read a study and write it up.")
@click.option(
    "--mpi", type=click.Choice(["auto", "site"]), default="auto", show_default=True, help="As in mpispeed run."
)
@click.option("--submit", is_flag=True, help="Submit a batch job for each run, as mpispeed sbatch does.")
@click.option("--wait", is_flag=True, help="With --submit: wait for the jobs and write the study up.")
@click.option("--site", envvar="MPISPEED_SITE", help="With --submit: a site's profile.")
@click.option("--ntasks-per-node", type=click.IntRange(min=1), help="With --submit: most ranks on a node.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), help="With --submit: cores of a rank.")
@click.option("--time", "-t", "time_limit", default="", help="With --submit: time limit of a run.")
@click.option("--partition", "-p", default="", help="With --submit.")
@click.option("--account", "-A", default="", help="With --submit.")
@click.option("--flag", "flags", multiple=True, metavar="--NAME=VALUE", help="With --submit: further flag of sbatch.")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scale(script: str | None, arguments: tuple[str, ...], **asked: Any) -> None:
    """Measure how SCRIPT gets faster with more ranks; everything after SCRIPT goes to the script.

    Steps are timed by the engine. Give the script enough of them: the first ones do not count.
    """
    from mpispeed.launch.scale import Study, parse_ranks, prepare

    if asked["collect"] is not None:
        _write_up(asked["collect"])
        return
    if script is None or not Path(script).is_file():
        msg = f"there is no script {script or ''} (looked from {Path.cwd()}); give its path, or --collect FOLDER"
        raise UsageError(msg)
    study = Study((script, *arguments), parse_ranks(asked["ranks"]), asked["mode"], asked["repeat"], asked["skip"])
    name = f"scaling-{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (asked["folder"] or Path("runs") / name).absolute()
    cases = prepare(study, folder)
    if asked["submit"]:
        jobs = _submit(cases, study.words[0], asked)
        click.echo(f"{len(jobs)} jobs: {' '.join(jobs)}; when they have ended: mpispeed scale --collect {folder}")
        if not asked["wait"]:
            return
        from mpispeed.launch.scale import wait_for
        from mpispeed.launch.submit import ended_of

        wait_for(jobs, ended_of)
    else:
        _run(cases, max(study.ranks), asked["mpi"])
    _write_up(folder)


def _run(cases: Sequence[Case], most: int, mpi: str) -> None:
    from mpispeed.launch.program import runner
    from mpispeed.launch.scale import run_case, threads_of

    threads = threads_of(most)
    for number, case in enumerate(cases, 1):
        click.echo(f"run {number} of {len(cases)}: {case.ranks} ranks", err=True)
        run_case(case, [sys.executable, *runner(), "-m", "mpispeed.launch.rank"], threads, mpi)


def _submit(cases: Sequence[Case], script: str, asked: dict[str, Any]) -> list[str]:
    """Submit a job for each run; all scripts are checked before the first one is submitted."""
    from mpispeed.cli.batch import show
    from mpispeed.launch.sbatch import Request, choose_template, fill, values_of
    from mpispeed.launch.sites import chosen_site
    from mpispeed.launch.submit import ask_partition, check_script, submit

    site = chosen_site(asked["site"])
    partition = ask_partition(asked["partition"] or site.partition)
    most = asked["ntasks_per_node"] or site.ranks_per_node or 1
    files = []
    for case in cases:
        nodes = -(-case.ranks // most)
        if case.ranks % nodes:
            msg = f"{case.ranks} ranks do not spread evenly over {nodes} nodes of {most}; choose other --ranks"
            raise UsageError(msg)
        exports = (f"export {name}={shlex.quote(value)}" for name, value in case.variables.items())
        request = Request(
            case.words, case.folder, Path.cwd(), job_name=f"{Path(script).stem}-{case.ranks}", nodes=nodes,
            ranks_per_node=case.ranks // nodes, cores_per_rank=asked["cpus_per_task"], time=asked["time_limit"],
            partition=asked["partition"], account=asked["account"], signal_seconds=0, flags=asked["flags"],
        )  # fmt: skip
        own = replace(site, setup=(*site.setup, *exports))
        # Cores by the fullest node: equal for all sizes, which could not be compared otherwise.
        cores = asked["cpus_per_task"] or max(1, (site.cores_per_node or partition.cores_per_node or most) // most)
        request = replace(request, cores_per_rank=cores)
        text = fill(choose_template(request), values_of(request, own, partition))
        show(text, check_script(text), is_dry=False)
        files.append(case.folder / "job.sbatch")
        files[-1].write_text(text)
    return [submit(file) for file in files]


def _write_up(folder: Path) -> None:
    """Write the table to the terminal; table, CSV and picture to the folder of the study."""
    from mpispeed.launch.efficiency import draw, rows_of, table, write_csv
    from mpispeed.launch.scale import collect

    study, runs, missing = collect(folder)
    for path in missing:
        click.echo(f"not there (still running, or failed): {path}", err=True)
    rows = rows_of(runs, study.mode, study.skip)
    text = table(rows, study.mode)
    click.echo(text)
    (folder / "scaling.txt").write_text(f"{study.mode} scaling of {' '.join(study.words)}\n{text}\n")
    write_csv(folder / "scaling.csv", rows)
    click.echo(f"table and CSV: {folder / 'scaling.txt'}, {folder / 'scaling.csv'}")
    try:
        draw(folder / "scaling.png", rows, study.mode, Path(study.words[0]).name)
    except UsageError as error:
        click.echo(f"no picture: {error}", err=True)
        return
    click.echo(f"picture: {folder / 'scaling.png'}")
