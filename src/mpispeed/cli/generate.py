"""`mpispeed generate`: the prompts of a file answered by all ranks of a job, over as many jobs as it takes.

Exit codes: 0 all prompts are answered, or the job was interrupted and can go on; 2 the question is wrong; others as of
any job that fails.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import UsageError
from mpispeed.base.launched import launched_rank

if TYPE_CHECKING:
    from mpispeed.generation.job import Settings

SHOWN_SECONDS = 1.0
"""How long ranks whose mistakes are not shown wait for the one that shows them."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")


class RankCommand(click.Command):
    """A command that every rank of a job is started with: mistakes in its options are shown by one of them."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options."""
        try:
            return super().make_context(*args, **kwargs)
        except click.ClickException:
            if launched_rank() == 0:
                raise
            time.sleep(SHOWN_SECONDS)
            sys.exit(2)


@click.command(cls=RankCommand)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a model of transformers, or weights.")
@click.option("--model-config", type=click.Path(path_type=Path), help="Folder of config and tokenizer of such weights.")
@click.option("--prompts", type=click.Path(path_type=Path), help="File of prompts: lines of JSON, or HDF5.")
@click.option("--out", "outputs", type=click.Path(path_type=Path), multiple=True,
              help="File of results, .h5 or .jsonl; may be given for both.")  # fmt: skip
@click.option("--show", "shown", type=click.Path(path_type=Path), help="Only show what results or a work folder have.")
@click.option("--work", type=click.Path(path_type=Path), help="Folder for finished batches; default: OUT.work.")
@click.option("--config", type=click.Path(path_type=Path), help="Settings of init_inference, a JSON file.")
@click.option("--tensor", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that share each layer.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of the weights.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of one answer.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Default: the likeliest token is taken.")
@click.option("--top-k", type=click.IntRange(min=0), help="Draw among so many of the likeliest tokens.")
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True), help="Draw among tokens of this share.")
@click.option("--repetition-penalty", type=click.FloatRange(min=0, min_open=True), help="On tokens that were there.")
@click.option("--seed", type=int, help="Of the random numbers; default: 0.")
@click.option("--stop", multiple=True, help="Text that ends an answer; repeatable.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Answers to each prompt.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=32, show_default=True, help="Most prompts of a batch."
)
@click.option("--max-batch-tokens", type=click.IntRange(min=2), help="Most tokens of a batch, answers included.")
@click.option("--too-long", type=click.Choice(["skip", "error", "truncate"]), default="skip", show_default=True,
              help="What becomes of prompts that leave no room for an answer.")  # fmt: skip
@click.option("--field", default="prompt", show_default=True, help="Entry (or dataset) of the prompts.")
@click.option("--id-field", default="id", show_default=True, help="Entry of their ids; - for none.")
@click.option("--no-special-tokens", is_flag=True, help="Texts are taken as they are, without a token to begin with.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="File with a template in place of the model's.")
@click.option("--token-ids", is_flag=True, help="Lines of JSON have the token ids of answers too.")
@click.option("--chain", type=click.Choice(["dependency", "requeue", "none"]), default="dependency", show_default=True,
              help="What follows a job that the end of its walltime interrupts.")  # fmt: skip
@click.option("--margin-seconds", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="To be left at the end of the walltime.")  # fmt: skip
@click.option("--interval", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="Seconds between lines of progress.")  # fmt: skip
def generate(shown: Path | None, **asked: Any) -> None:
    """Answer prompts with a model: srun mpispeed generate --model M --prompts P.jsonl --out R.h5.

    Every rank of the job runs this command, under srun or mpirun. Started again after a kill or the end of the
    walltime, it goes on where it was.
    """
    if shown is not None:
        _show(shown)
        return
    lacking = [f"--{name}" for name in ("model", "prompts") if asked[name] is None] + ["--out"] * (not asked["outputs"])
    if lacking:
        if launched_rank():
            time.sleep(SHOWN_SECONDS)
            sys.exit(2)
        msg = f"{', '.join(lacking)} is missing; see mpispeed generate --help"
        raise UsageError(msg)
    from mpispeed.engine.distributed import join_world
    from mpispeed.generation.job import run

    with join_world().comm.together(UsageError):  # each rank reads files, and one of them tells what is wrong
        settings = _settings(asked)
    run(settings)


def _show(path: Path) -> None:
    from mpispeed.generation.show import show

    for line in show(path).lines():
        click.echo(line)


def _settings(asked: dict[str, Any]) -> Settings:
    from mpispeed.generation.job import Settings
    from mpispeed.generation.requests import Options
    from mpispeed.generation.stopping import Plan

    template = asked["chat_template"]
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    options = Options(**{name: asked[name] for name in names}, stop=asked["stop"] or None, n=asked["samples"])
    return Settings(
        asked["model"], asked["prompts"], asked["outputs"], asked["work"], asked["model_config"], asked["tensor"],
        None if asked["dtype"] == "auto" else asked["dtype"], _read_config(asked["config"]), options,
        asked["batch_size"], asked["max_batch_tokens"], asked["too_long"], asked["field"],
        None if asked["id_field"] == "-" else asked["id_field"], not asked["no_special_tokens"],
        None if template is None else _read(template, "--chat-template"), asked["token_ids"],
        Plan(asked["chain"], asked["margin_seconds"], asked["interval"]),
    )  # fmt: skip


def _read_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(_read(path, "--config"))
    except ValueError as error:
        msg = f"--config {path} is no JSON: {error}"
        raise UsageError(msg) from error
    if not isinstance(found, dict):
        msg = f"--config {path} has no settings of init_inference: expected an object"
        raise UsageError(msg)
    return found


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        msg = f"{option} {path} cannot be read: {error}"
        raise UsageError(msg) from error
