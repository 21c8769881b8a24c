"""`mpispeed qsub`: a batch script of PBS from a site's profile and a config; checked, then submitted.

Exit codes: 0 submitted (or shown, or written), 2 the question is wrong or a check has failed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.cli.plan import Count


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--site", metavar="NAME|FILE", envvar="MPISPEED_SITE", help="A site's profile; default: MPISPEED_SITE.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes.")
@click.option("--ntasks-per-node", type=click.IntRange(min=1), help="Ranks on each; default: the site's, else 1.")
@click.option("--cpus-per-task", type=click.IntRange(min=1), help="Cores of a rank; default: an equal share.")
@click.option("--gpus-per-node", type=click.IntRange(min=0), help="GPUs of a node; ranks choose by local rank.")
@click.option("--mem", type=Count(), help="Memory of a node, such as 100GiB; default: the site's.")
@click.option("--time", "-t", "time_limit", default="", help="Time limit: minutes, or D-HH:MM:SS.")
@click.option("--queue", "-q", default="", help="Default: the partition of the site's profile.")
@click.option("--account", "-A", default="", help="Default: the site's.")
@click.option("--python", default=sys.executable, help="The interpreter; default: this one.")
@click.option("--job-name", "-J", default="", help="Default: the name of the script.")
@click.option("--run-dir", type=click.Path(path_type=Path), help="For logs and reports; default: a new one in runs/.")
@click.option("--flag", "flags", multiple=True, metavar="'-X VALUE'", help="Further flag of qsub; repeatable.")
@click.option(
    "--mpi", type=click.Choice(["auto", "site"]), default="auto", show_default=True, help="As in mpispeed run."
)
@click.option("--config", type=click.Path(), help="Checked, and given to SCRIPT as --deepspeed_config.")
@click.option("--dry-run", is_flag=True, help="Show the script and what the checks say; nothing is written.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the script to this file; not submitted.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def qsub(script: str, arguments: tuple[str, ...], **asked: Any) -> None:
    """Submit SCRIPT with its arguments as a job of PBS; options of this command come before SCRIPT."""
    from mpispeed.launch.qsub import QsubRequest, check, fill, submit
    from mpispeed.launch.sites import chosen_site

    if not Path(script).is_file():
        msg = f"there is no script {script} (looked from {Path.cwd()}); give its path"
        raise UsageError(msg)
    site = chosen_site(asked["site"])
    words, resubmits = [script, *arguments], False
    ranks = (asked["ntasks_per_node"] or site.ranks_per_node or 1) * asked["nodes"]
    if asked["config"]:
        resubmits = _goes_on(asked["config"], ranks)
        words += ["--deepspeed_config", asked["config"]]
    name = asked["job_name"] or Path(script).stem
    request = QsubRequest(
        words, _run_folder(asked["run_dir"], name, site.scratch), Path.cwd(), name, asked["python"], asked["nodes"],
        asked["ntasks_per_node"], asked["cpus_per_task"], asked["gpus_per_node"], asked["mem"], asked["time_limit"],
        asked["queue"], asked["account"], resubmits, asked["flags"],
        ("--mpi", "site") if asked["mpi"] == "site" else (),
    )  # fmt: skip
    text = fill(request, site)
    checked = check(text)
    if asked["dry_run"]:
        click.echo(text, nl=False)
    for note in checked.notes:
        click.echo(note, err=True)
    if checked.problems:
        msg = "the batch script is not submitted:\n" + "\n".join(f"- {problem}" for problem in checked.problems)
        raise UsageError(msg)
    if asked["dry_run"]:
        return
    target = asked["output"] or request.run_folder / "job.pbs"
    try:
        request.run_folder.mkdir(parents=True, exist_ok=True)  # PBS does not make the folder of its log
        target.write_text(text)
    except OSError as error:
        msg = f"the batch script cannot be written to {error.filename}: {error.strerror}"
        raise UsageError(msg) from error
    if asked["output"] is not None:
        click.echo(f"written to {target}; submit it with: qsub {target}")
        return
    click.echo(f"job {submit(target)}, {name}; logs and reports in {request.run_folder}")


def _goes_on(file: str, ranks: int) -> bool:
    """True if a run with these settings saves before the limit and is to go on in the next job.

    Raises:
        ConfigError: a run would refuse them.
        UsageError: the chain needs commands of SLURM.
    """
    from mpispeed.config import load_for_run

    loaded = load_for_run(file, ranks)
    for warning in loaded.warnings:
        click.echo(f"{printable(loaded.where)}: warning: {printable(warning)}", err=True)
    section = loaded.config.walltime
    if not section.enabled or section.save_dir is None:
        return False
    if section.chain == "dependency":
        msg = (
            f'{printable(file)}: walltime.chain is "dependency", which needs sbatch; set it to "requeue", and the '
            "script of the job submits it again"
        )
        raise UsageError(msg)
    return bool(section.chain == "requeue")


def _run_folder(asked: Path | None, name: str, scratch: str) -> Path:
    if asked is not None:
        return asked.absolute()
    base = os.path.expandvars(scratch)
    if "$" in base:
        msg = f"scratch of the site is {scratch!r}, and not all of its variables are set here; use --run-dir"
        raise UsageError(msg)
    return Path(base or ".").absolute() / "runs" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
