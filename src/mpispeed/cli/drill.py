"""`mpispeed drill`: break a run on purpose and check that it ends, explains its end, and can resume."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable
from mpispeed.drill.catalog import DRILLS, choose, names_known, table

if TYPE_CHECKING:
    from mpispeed.drill.catalog import Drill, Result
    from mpispeed.drill.runner import Settings


def _show_list(ctx: click.Context, _parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        for drill in DRILLS:
            click.echo(f"{drill.name:10} the run {drill.end:9} {drill.what}: {drill.inject}")
        ctx.exit()


class DrillCommand(click.Command):
    """Takes its options before NAME and between NAME and SCRIPT; everything after SCRIPT is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move NAME behind the options that follow it."""
        before, words = self._cut(ctx, args)
        if len(words) > 1 and words[1].startswith("-"):
            behind, rest = self._cut(ctx, words[1:])
            args = [*before, *behind, words[0], *rest]
        return super().parse_args(ctx, args)

    def _cut(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str]]:
        """Split the words into leading options with their values, and the rest."""
        found, _, _ = self.make_parser(ctx).parse_args(list(args))
        tail = found["arguments"]
        words = [found["names"], found["script"], *(tail if isinstance(tail, tuple) else ())]
        words = [word for word in words if isinstance(word, str)]  # what is not there is no text in any click
        return args[: len(args) - len(words)], words


@click.command(cls=DrillCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_show_list, help="Show all drills.")
@click.option("-n", "--ranks", type=click.IntRange(min=1), default=2, show_default=True, help="Number of ranks.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank with the fault; by default the last one.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of outputs and of the report.")
@click.option("--resume-args", default="", help="What the script needs besides ARGS to go on, such as --resume.")
@click.option("--limit", type=click.FloatRange(min=1), default=300, show_default=True, help="Seconds for one start.")
@click.option(
    "--watch-seconds",
    type=click.FloatRange(min=0.5),
    default=8,
    show_default=True,
    help="By when a hang has to be named.",
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(min=1),
    default=15,
    show_default=True,
    help="Seconds that others wait for a late rank before the job is ended.",
)
@click.option("--rtol", type=float, default=0.0, show_default=True, help="Relative tolerance of the same result.")
@click.argument("names", metavar="NAME[,NAME]|all")
@click.argument("script")
@click.argument("arguments", metavar="ARGS", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def drill(
    ctx: click.Context,
    ranks: int,
    rank: int | None,
    out: Path | None,
    resume_args: str,
    limit: float,
    watch_seconds: float,
    hang_timeout: float,
    rtol: float,
    names: str,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT once as it is and once with each fault; the report says what held.

    {dir} in ARGS stands for a folder that each drill has for itself: let the script save its checkpoints there and go
    on from them when it is started again. Then it is also checked that the last checkpoint is whole, and that the run
    goes on to the same result. The exit code is 1 if a drill failed.
    """
    from mpispeed.drill.runner import Settings, run_drill, run_reference  # not needed for --help

    drills, left_out = _chosen(names, ranks)
    resume_words = _words_of(resume_args)
    odd = ranks - 1 if rank is None else rank
    if odd >= ranks:
        msg = f"--rank {odd}: there are {ranks} ranks, from 0 to {ranks - 1}"
        raise UsageError(msg)
    if not Path(script).is_file():
        what = f"option {script}" if script.startswith("-") else f"script {script} (looked from {Path.cwd()})"
        msg = f"there is no {what}; write mpispeed drill {names} -n {ranks} SCRIPT ARGS"
        raise UsageError(msg)
    folder = (out or Path(f"mpispeed-drills-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    if folder.exists() and any(folder.iterdir()):
        msg = f"--out {folder} is not empty; drills need a folder without older checkpoints, name another"
        raise UsageError(msg)
    command = [sys.executable, "-m", "mpispeed.cli.main", "run", "-n", str(ranks), script]
    settings = Settings(command, arguments, resume_words, folder, odd, limit, watch_seconds, hang_timeout, rtol)
    click.echo(f"without a fault ({len(drills)} drills follow, in {folder})", err=True)
    reference = run_reference(settings)
    results = []
    for each in drills:
        click.echo(f"{each.name}: {each.what}", err=True)
        results.append(run_drill(each, settings, reference))
    _report(settings, ranks, script, results, left_out)
    ctx.exit(int(not all(result.is_passed for result in results)))


def _words_of(resume_args: str) -> list[str]:
    try:
        return shlex.split(resume_args)
    except ValueError as error:
        msg = f"--resume-args {printable(resume_args)}: cannot be read as a shell does: {error}; close every quote"
        raise UsageError(msg) from None


def _chosen(names: str, ranks: int) -> tuple[list[Drill], dict[str, str]]:
    try:
        drills, left_out = choose(names, ranks)
    except KeyError as error:
        msg = f"there is no drill {error.args[0]!r}; choose of {', '.join(names_known())}, or all"
        raise UsageError(msg) from None
    if not drills:
        msg = f"{names}: one rank alone cannot have these; start at least two with -n 2"
        raise UsageError(msg)
    return drills, dict.fromkeys(left_out, "needs at least 2 ranks")


def _report(settings: Settings, ranks: int, script: str, results: list[Result], left_out: dict[str, str]) -> None:
    lines = table(results, left_out)
    click.echo("\n".join(lines))
    facts = {
        "passed": all(result.is_passed for result in results), "script": script, "arguments": list(settings.arguments),
        "ranks": ranks, "rank": settings.rank, "drills": [result.as_row() for result in results],
        "left_out": left_out,
    }  # fmt: skip
    (settings.folder / "drills.json").write_text(json.dumps(facts, indent=1) + "\n")
    (settings.folder / "drills.txt").write_text("\n".join(lines) + "\n")
    click.echo(f"report: {settings.folder / 'drills.json'}")
