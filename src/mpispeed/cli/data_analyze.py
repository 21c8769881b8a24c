"""`mpispeed data analyze`: metrics of the samples of a token store, by all ranks of a job.

Exit codes: 0 the files are there; 2 something is wrong with the question or the store; others as of any job that fails.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.plain import printable
from mpispeed.cli.generate import RankCommand

if TYPE_CHECKING:
    import numpy as np

    from mpispeed.curriculum.store_metrics import StoreSamples
    from mpispeed.mesh.comm import Comm

LENGTH, RARITY = "length", "rarity"
BATCH = 1024


def _weights(_: click.Context, __: click.Parameter, text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(weight) for weight in text.split(",")]
    except ValueError as failure:
        msg = f"{text!r} is no list of numbers such as 98,1,1"
        raise click.BadParameter(msg) from failure


@click.command(cls=RankCommand)
@click.option("--metric", "-m", "metrics", multiple=True, metavar="METRIC",
              help="length, rarity, column:NAME, NAME=MODULE:FUNCTION; repeatable. Default: first two.")  # fmt: skip
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Folder of index files, one folder in it a metric.")
@click.option("--add-columns", is_flag=True, help="Add what was measured of documents to the store.")
@click.option("--samples", "kind", type=click.Choice(["documents", "windows", "rows"]), default="documents",
              show_default=True, help="What the samples of training are.")  # fmt: skip
@click.option("--length", type=click.IntRange(min=1), help="Tokens of a window, or of a document as functions get it.")
@click.option("--labels", type=click.Choice(["next", "same", "none"]), default="next", show_default=True,
              help="As of the data set that is trained with; windows that need a next token are fewer.")  # fmt: skip
@click.option("--split", callback=_weights, metavar="WEIGHTS", help="Weights that cut the store into parts: 98,1,1.")
@click.option("--part", type=click.IntRange(min=0), default=0, show_default=True, help="The part to analyse.")
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=100.0, show_default=True,
              help="Index files hold integers: values that are none are multiplied by it and rounded.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), default=BATCH, show_default=True, help="Samples of a call.")
@click.argument("path", metavar="STORE", type=click.Path(path_type=Path))
def analyze(path: Path, **asked: Any) -> None:
    """Measure the samples of a token store: mpirun -n 4 mpispeed data analyze corpus.h5 --out metrics.

    Index files are those of DeepSpeed's analyzer, for its sampler and this one. rarity is the sum of -log p over the
    tokens of a sample, in nats, p the share of a token among all; index files hold hundredths of it.
    """
    from mpispeed.curriculum.store_metrics import StoreSamples
    from mpispeed.mesh.world import start
    from mpispeed.tokens.store import open_store

    world = start()  # first, so that a mistake is shown once
    names = {_name_of(metric): metric for metric in asked["metrics"] or (LENGTH, RARITY)}
    if asked["out"] is None and not asked["add_columns"]:
        msg = "say what is to be made: --out FOLDER for index files, --add-columns for columns of the store, or both"
        raise ConfigError(msg)
    if asked["add_columns"] and (asked["kind"] != "documents" or asked["split"]):
        msg = "--add-columns is for all documents of a store; leave out --samples and --split, or --add-columns"
        raise ConfigError(msg)
    with open_store(path, world.node) as store:
        samples = StoreSamples.of(
            store, asked["kind"], asked["length"], split=asked["split"], part=asked["part"], labels=asked["labels"]
        )
        for name, metric in names.items():
            _one(world.comm, samples, name, metric, asked)


def _one(comm: Comm, samples: StoreSamples, name: str, metric: str, asked: dict[str, Any]) -> None:
    """Measure and write one metric. Collective over: `comm`."""
    import numpy as np

    from mpispeed.curriculum import store_columns
    from mpispeed.curriculum import store_metrics as of_store
    from mpispeed.curriculum.ordered_writes import write_index_files
    from mpispeed.curriculum.sample_sort import Pairs

    start, stop = of_store.own_range(comm, samples)
    if metric == RARITY:
        values: np.ndarray = of_store.rarities(comm, samples, start, stop)
    else:
        with comm.together(UsageError, doing=f"metric {name!r}"):
            if metric == LENGTH:
                values = of_store.lengths(samples, start, stop)
            elif metric.startswith("column:"):
                values = of_store.column_values(samples, name, start, stop)
            else:
                values = of_store.called(
                    samples, _function(metric.partition("=")[2]), name, start, stop, asked["batch_size"]
                )
    if asked["add_columns"] and not metric.startswith("column:"):
        store_columns.add_to_store(comm, samples.store.path, name, values)
        if comm.rank == 0:
            click.echo(f"{printable(str(samples.store.path))}: column {name} of {samples.count} documents")
    if asked["out"] is not None:
        with comm.together(UsageError, doing=f"metric {name!r}"):
            whole = of_store.whole_numbers(values, asked["scale"])
        folder = asked["out"] / name
        write_index_files(comm, folder, name, Pairs(whole, np.arange(start, stop, dtype=np.int64)), samples.count)
        if comm.rank == 0:
            click.echo(f"{printable(str(folder))}: {name} of {samples.count} {samples.kind}")


def _name_of(metric: str) -> str:
    """The name of a metric, which is one of a folder and of a column."""
    name, _, function = metric.removeprefix("column:").partition("=")
    if not function and metric not in (LENGTH, RARITY) and not metric.startswith("column:"):
        msg = f"--metric {metric!r} is none of {LENGTH}, {RARITY}, column:NAME, NAME=MODULE:FUNCTION"
        raise ConfigError(msg)
    if not name.isidentifier():
        msg = f"--metric {metric!r}: {name!r} is no name; take letters, digits and _"
        raise ConfigError(msg)
    return name


def _function(target: str) -> Callable[[Any], Any]:
    module, _, attribute = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as failure:  # whatever the user's module raises
        msg = f"{target!r} cannot be imported as MODULE:FUNCTION: {type(failure).__name__}: {failure}"
        raise ConfigError(msg) from failure
    if not callable(found):
        msg = f"{target!r} is a {type(found).__name__}; a function of a batch is wanted"
        raise ConfigError(msg)
    return found
