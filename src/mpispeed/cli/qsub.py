"""`mpispeed qsub`: a batch script of PBS from a site's profile and a config; checked, then submitted.

Exit codes: 0 submitted (or shown, or written), 2 the question is wrong or a check has failed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.cli.batch import fields_of, show, with_resources, write
from mpispeed.cli.plan import Count


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@with_resources
@click.option("--mem", type=Count(), help="Memory of a node, such as 100GiB; default: the site's.")
@click.option("--queue", "-q", default="", help="Default: the partition of the site's profile.")
@click.option("--python", default=sys.executable, help="The interpreter; default: this one.")
@click.option("--flag", "flags", multiple=True, metavar="'-X VALUE'", help="Further flag of qsub; repeatable.")
@click.option(
    "--mpi", type=click.Choice(["auto", "site"]), default="auto", show_default=True, help="As in mpispeed run."
)
@click.option("--config", type=click.Path(), help="Checked, and given to SCRIPT as --deepspeed_config.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def qsub(script: str, arguments: tuple[str, ...], **asked: Any) -> None:
    """Submit SCRIPT with its arguments as a job of PBS; options of this command come before SCRIPT."""
    from mpispeed.launch.qsub import check, fill, submit
    from mpispeed.launch.sbatch import Request
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
    request = Request(
        **fields_of(words, asked, site), partition=asked["queue"], requeues=resubmits, python=asked["python"],
        run_flags=("--mpi", "site") if asked["mpi"] == "site" else (),
    )  # fmt: skip
    text = fill(request, site)
    show(text, check(text), is_dry=asked["dry_run"])
    if asked["dry_run"]:
        return
    target = write(text, request.run_folder, "job.pbs", asked["output"], "qsub")
    if target is not None:
        click.echo(f"job {submit(target)}, {request.job_name}; logs and reports in {request.run_folder}")


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
