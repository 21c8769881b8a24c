"""`mpispeed elastic`: batch sizes and numbers of ranks that the section `elasticity` leads to.

Exit codes: 0 there is a batch size, 2 there is none, or not on so many ranks.
"""

from __future__ import annotations

import json
from typing import Any

import click

# pydantic is imported by the command, so that `mpispeed --help` stays fast.


@click.command()
@click.option("-c", "--config", "file", required=True, metavar="CONFIG", help="Configuration with elasticity.")
@click.option("-w", "--world-size", type=click.IntRange(min=1), help="Also the batch sizes on this many ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def elastic(file: str, world_size: int | None, as_json: bool) -> None:
    """Show the batch size of CONFIG's elasticity, and the numbers of ranks it divides among."""
    from mpispeed.config import load
    from mpispeed.config.elastic_batch import elastic_triple, find_run_warnings, require_enabled

    loaded = load(file)
    section = require_enabled(loaded.config.elasticity, loaded.where)
    answer = _answer(section)
    if world_size is not None:
        data = max(1, world_size // section.model_parallel_size)
        triple = elastic_triple(section, world_size, data)
        answer["here"] = {"ranks": world_size, **dict(zip(("batch", "micro_batch", "steps"), triple, strict=True))}
        for sentence in find_run_warnings(section, world_size):
            click.echo(f"{loaded.where}: warning: {sentence}", err=True)
    if as_json:
        click.echo(json.dumps({"elasticity": section.model_dump(), **answer}))
        return
    click.echo(json.dumps({"elasticity": section.model_dump()}, indent=1))
    _show(answer)


def _answer(section: Any) -> dict[str, Any]:
    """Batch, numbers of ranks, and for each the micro-batch and its count per rank and step."""
    from mpispeed.config.elastic_batch import choose, elastic_triple

    choice, sharing = choose(section), section.model_parallel_size
    rows = [(sharing * data, *elastic_triple(section, sharing * data, data)[1:]) for data in choice.counts]
    keys = ("ranks", "micro_batch", "steps")
    return {"batch": choice.batch, "on": [dict(zip(keys, row, strict=True)) for row in rows]}


def _show(answer: dict[str, Any]) -> None:
    numbers = [str(row["ranks"]) for row in answer["on"]]
    click.echo(f"train_batch_size  {answer['batch']}")
    click.echo(f"ranks             {' '.join(numbers)} ({len(numbers)} numbers)")
    here = answer.get("here")
    if here:
        click.echo(
            f"on {here['ranks']} ranks: {here['batch']} samples in a step = {here['micro_batch']} in a micro-batch "
            f"x {here['steps']} accumulation steps x the data-parallel ranks"
        )
        return
    click.echo(f"{'ranks':>10}{'micro-batch':>14}{'steps':>8}")
    for row in answer["on"]:
        click.echo(f"{row['ranks']:>10}{row['micro_batch']:>14}{row['steps']:>8}")
