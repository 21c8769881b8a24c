"""`mpispeed tune`: find fast settings for a script by short trials in one job."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.units import format_duration
from mpispeed.cli.plan import Count
from mpispeed.cli.run_options import wishes_of, with_options

if TYPE_CHECKING:
    from mpispeed.tuning.api import Answer, Request
    from mpispeed.tuning.results import Row

WORDS_OF_CONFIG = ("add_config_arguments", "deepspeed_config")
"""A script that has one of these takes its settings by --deepspeed_config."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@with_options
@click.option("--memory", type=Count(), help="Bytes of a node that trials may use; default: what it has left.")
@click.option("--dry-run", is_flag=True, help="Show the candidates, and start nothing.")
@click.option("--debug", is_flag=True, help="Set MPISPEED_DEBUG=1: errors of mpispeed come with a traceback.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.argument("file", metavar="CONFIG", type=click.Path(path_type=Path))
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def tune(ctx: click.Context, file: Path, script: str, arguments: tuple[str, ...], **chosen: Any) -> None:
    """Search for the settings with which SCRIPT trains fastest, beginning with those of CONFIG.

    A list in CONFIG in the place of a value has the values to try; the section "autotuning" says how. All trials run in
    one job, on the ranks that `mpispeed run` would start. Everything after SCRIPT goes to the script; in a word
    --deepspeed_config FILE.json it gets the settings of each trial.

    Exit codes: 0 something was measured, 1 no trial worked, 2 the question is wrong.
    """
    answer = tuned(chosen, file, script, arguments)
    ctx.exit(0 if answer is None or answer.found.best is not None else 1)


def tuned(chosen: dict[str, Any], file: Path, script: str, arguments: Sequence[str]) -> Answer | None:
    """Search, and print rows as they come, then the tables; None after `--dry-run`.

    Args:
        chosen: options of the command.
        file: of settings.
        script: path, or name of a module.
        arguments: words of the script.

    Raises:
        ConfigError: something in the file or the options is wrong.
        UsageError: there is no such script, or what `tuning.api.search` raises.
    """
    from mpispeed.tuning.api import search  # pydantic and torch are not needed for --help

    request = _request(chosen, file, script, list(arguments))
    if chosen["dry_run"]:
        _show_candidates(request)
        return None
    answer = search(request, _say)
    _conclude(answer)
    return answer


def _request(chosen: dict[str, Any], file: Path, script: str, arguments: list[str]) -> Request:
    from mpispeed.tuning.api import Request
    from mpispeed.tuning.words import config_of

    if chosen.get("no_python") or chosen["elastic"]:
        msg = "trials run a Python script on ranks that stay; leave out --no_python and --elastic"
        raise ConfigError(msg)
    is_module = chosen["module"]
    if not is_module and not Path(script).is_file():
        msg = f"there is no script {script} (looked from {Path.cwd()}); give its path, or -m for a module"
        raise UsageError(msg)
    chosen = {**chosen, "no_python": False, "torch_env": chosen["torch_env"] or chosen["as_deepspeed"]}
    if not is_module and config_of(arguments) is None:
        text = Path(script).read_text(errors="replace")
        if any(word in text for word in WORDS_OF_CONFIG):
            arguments += ["--deepspeed_config", str(file)]
    wishes = wishes_of(chosen, os.environ)
    words = ("-m", script) if is_module else (script,)
    ranks = None if wishes.hosts else chosen["ranks"]
    return Request(file, words, tuple(arguments), ranks, chosen["mpi"], wishes, chosen["debug"], chosen.get("memory"))


def _show_candidates(request: Request) -> None:
    from mpispeed.tuning.api import count, read
    from mpispeed.tuning.space import Space

    raw, tuning = read(request.file)
    found = Space(raw, tuning, count(request)).first()
    for one in found:
        click.echo(one.name)
    click.echo(f"{len(found)} candidates", err=True)


# -- output ------------------------------------------------------------------------------------------------------------


def _say(row: Row | str) -> None:
    """A line for each row as it comes, on stderr: the table at the end is the result."""
    click.echo(f"mpispeed: tune: {row if isinstance(row, str) else _line(row)}", err=True)


def _line(row: Row) -> str:
    if row.seconds:
        told = f", predicted {format_duration(row.predicted_seconds)}" if row.predicted_seconds else ""
        rate = row.train_batch / row.seconds
        return f"{row.name}: {format_duration(row.seconds)} a step, {rate:.4g} samples/s{told}"
    return f"{row.name}: {row.status}: {row.reason}"


def _conclude(answer: Answer) -> None:
    from mpispeed.cli.plan import columns
    from mpispeed.tuning.results import HEAD, cells

    rows = answer.found.rows
    click.echo(columns(HEAD, [cells(row) for row in rows]))
    click.echo()
    click.echo(answer.summary, nl=False)
    for note in (*answer.found.ended, *answer.notes):
        click.echo(note)
    if answer.found.best is None:
        click.echo(
            "no trial worked; the reasons are in the table, and the output in the folders of the trials", err=True
        )
        return
    click.echo(f"best: {answer.found.best.name}, in {answer.optimal}")
    click.echo(f"train with it: {(answer.folders.results / 'cmd_optimal.txt').read_text().strip()}")


# -- `mpispeed run --autotuning` ---------------------------------------------------------------------------------------


def autotuned(chosen: dict[str, Any], script: str, arguments: Sequence[str]) -> list[str] | None:
    """What `mpispeed run --autotuning` does before a run: the words for the best settings; None after `--dry-run`.

    Raises:
        ConfigError: the words name no file of settings, or its section does not say `enabled`.
    """
    from mpispeed.tuning.api import read
    from mpispeed.tuning.words import config_of

    file = config_of(arguments)
    if file is None:
        msg = f"--autotuning {chosen['autotuning']}: give the script its settings with --deepspeed_config FILE.json"
        raise ConfigError(msg)
    if not read(file)[1].enabled:
        msg = (
            f'--autotuning {chosen["autotuning"]}: {file} has no "autotuning": {{"enabled": true}}; set it, or search '
            f"with: mpispeed tune {shlex.quote(str(file))} {shlex.quote(script)}"
        )
        raise ConfigError(msg)
    answer = tuned(chosen, file, script, arguments)
    if answer is None:
        return None
    if answer.found.best is None:
        sys.exit(1)
    return list(answer.arguments)
