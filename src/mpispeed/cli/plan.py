"""`mpispeed plan`: memory and traffic of a configuration before anything starts, and if this machine has enough.

With `--schedule` it draws a pipeline schedule instead.

Exit codes: 0 it fits, 1 it does not fit, 2 the question is wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import ConfigError, MpispeedError
from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes, format_count, parse_count
from mpispeed.cli.plan_activations import activation_rows, as_values, longest_sentence
from mpispeed.cli.plan_schedule import refuse_unused, schedule_options, show

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.estimate.budget import Budget, Sent
    from mpispeed.engine.estimate.feasibility import Limit, Setup, Verdict
    from mpispeed.engine.estimate.stages import RankBudget, Source
    from mpispeed.plan.plan import Plan

# torch and pydantic are imported by the command, so that `mpispeed --help` stays fast.

MOST_LAYERS = 100_000
"""Most layers of a model that is given by its size alone; more would only take time."""


class Count(click.ParamType):
    """A whole number with an exponent or a unit."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read 7e9, 64Ki or 2GiB as a whole number."""
        try:
            return parse_count(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("file", metavar="[CONFIG]", required=False)
@click.option("--model", "target", metavar="MODULE:CALLABLE", help="What builds the model; it is not allocated.")
@click.option("--model-args", default="{}", metavar="JSON", help="Its arguments: an object, or a list.")
@click.option("--params", type=Count(), help="Instead of --model: parameters of the model, such as 7e9.")
@click.option("--largest-layer", type=Count(), help="With --params: parameters of the largest layer.")
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="Ranks in all.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes they run on.")
@click.option("--zero-init", is_flag=True, help="The model is built inside of mpispeed.zero.Init.")
@click.option("--activations", type=Count(), default=0, help="Bytes each rank needs besides, such as activations.")
@click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens of a sample, to count activations.")
@click.option("--longest-sequence", "is_longest", is_flag=True, help="Find the longest sample that fits.")
@click.option("--memory", type=Count(), help="Bytes of a node to compare with; default: what this machine has left.")
@schedule_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    file: str | None,
    target: str | None,
    model_args: str,
    params: int | None,
    largest_layer: int | None,
    ranks: int | None,
    nodes: int,
    zero_init: bool,
    activations: int,
    sequence_length: int | None,
    is_longest: bool,
    memory: int | None,
    schedule: str | None,
    as_json: bool,
    **drawing: Any,
) -> None:
    """Say what CONFIG needs on every rank and sends in every step, and whether it fits: GO or NO-GO.

    With --schedule, without CONFIG: draw a pipeline schedule, prove it and show its bubble.
    """
    if schedule is not None:
        _refuse_both(file, ranks)
        show(schedule, drawing, as_json=as_json)
        return
    if file is None or ranks is None:
        msg = "give CONFIG and the number of ranks, -n or --ranks; or --schedule, for a pipeline"
        raise click.UsageError(msg)
    from mpispeed.engine.estimate.feasibility import Setup

    try:
        refuse_unused(drawing)
        if nodes > ranks:
            msg = f"--nodes {nodes} is more than the {ranks} ranks of -n; every node runs at least one rank"
            raise ConfigError(msg)
        model = make_model(target, model_args, params, largest_layer)
        config = read_config(file)
        setup = Setup(config, ranks, nodes, zero_init, activations, sequence_length or 0)
        answer, is_go = _answer(setup, model, memory, is_longest=is_longest, as_json=as_json)
    except MpispeedError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error)}))
        click.echo(f"mpispeed plan: {error}", err=True)
        sys.exit(2)
    click.echo(answer)
    sys.exit(0 if is_go else 1)


def _answer(setup: Setup, model: Source, memory: int | None, *, is_longest: bool, as_json: bool) -> tuple[str, bool]:
    from mpispeed.base.cgroups import Limit, machine_limits
    from mpispeed.engine.estimate.feasibility import longest_sequence
    from mpispeed.engine.estimate.stages import built_once

    limits = machine_limits() if memory is None else [Limit("--memory", memory)]
    model = built_once(setup.config, model, setup.ranks)
    longest = None
    if is_longest and limits:
        longest = longest_sequence(setup, model, None, limits)
        setup = setup if setup.sequence_length or not longest else replace(setup, sequence_length=longest)
    resolved, stages, verdict = forecast(setup, model, limits)
    write = _as_json if as_json else _as_text
    return write(setup, resolved, stages, verdict, longest), verdict.is_go


def forecast(setup: Setup, model: Source, limits: list[Limit]) -> tuple[Plan, Sequence[RankBudget], Verdict]:
    """Predict the layout, memory and traffic of a setup, and if it fits.

    Raises:
        ConfigError: the settings cannot hold, or the model cannot be cut so.
    """
    from mpispeed.engine.estimate.feasibility import examine, judge
    from mpispeed.engine.estimate.stages import built_once

    source = built_once(setup.config, model, setup.ranks)
    examined = examine(setup, source)
    return *examined, judge(setup, source, None, limits, examined)


def _refuse_both(file: str | None, ranks: int | None) -> None:
    if file is not None or ranks is not None:
        msg = "--schedule draws a pipeline by itself; leave out CONFIG and -n"
        raise click.UsageError(msg)


# -- input -----------------------------------------------------------------------------------------------------------


def make_model(target: str | None, arguments: str, params: int | None, largest: int | None) -> Source:
    """A function that makes the model to plan, without memory: by `target`, or of a size.

    Raises:
        ConfigError: it is given twice or not at all, or `target` cannot be found.
    """
    size = _size_of(target, params, largest)
    if target is None:
        return lambda: _sized_model(*size)
    make, given = _find(target), _arguments(arguments)
    return lambda: _build(target, make, *given)


def _size_of(target: str | None, params: int | None, largest: int | None) -> tuple[int, int]:
    if (target is None) == (params is None) or (params is None) != (largest is None):
        msg = "give the model either as --model MODULE:CALLABLE or by its size, --params 7e9 --largest-layer 1e8"
        raise ConfigError(msg)
    params, largest = params or 1, largest or 1
    if not 0 < largest <= params or params > MOST_LAYERS * largest:
        msg = (
            f"--largest-layer {largest} of --params {params}: expected a part of all parameters, and at least one in "
            f"{MOST_LAYERS} of them"
        )
        raise ConfigError(msg)
    return params, largest


def read_config(file: str) -> Any:
    """Read the settings; those without effect in this version give a warning, not an error, as this is only a plan."""
    from mpispeed.config import load
    from mpispeed.config.unavailable import find_unavailable

    loaded = load(file)
    for warning in loaded.warnings:
        click.echo(f"{printable(loaded.where)}: warning: {printable(warning)}", err=True)
    for problem in find_unavailable(loaded.config):
        click.echo(f"{loaded.where}: a run would refuse this: {problem.path}: {problem.what}", err=True)
    return loaded.config


def _build(target: str, make: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Build a model, or a list of layers, on the meta device.

    Raises:
        ConfigError: the path, the arguments or the model are not usable.
    """
    import torch

    from mpispeed.base.meta import without_memory
    from mpispeed.pipe.module import PipelineModule

    try:
        model = without_memory(lambda: make(*args, **kwargs))
    except Exception as error:  # whatever the user's code raises
        msg = f"--model {target} cannot be built on torch's meta device: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    if isinstance(model, list | tuple):
        return model
    if not isinstance(model, torch.nn.Module):
        msg = f"--model {target} gave a {type(model).__name__}; expected a torch.nn.Module"
        raise ConfigError(msg)
    placed = [name for name, param in model.named_parameters() if param.device.type != "meta"]
    if placed:
        msg = (
            f"--model {target} put {len(placed)} parameters on a device of their own, the first is {placed[0]!r}; "
            "leave out device= where parameters are made, so that they can be planned without memory"
        )
        raise ConfigError(msg)
    if next(model.parameters(), None) is None and not isinstance(model, PipelineModule):  # a stage may have none
        msg = f"--model {target} has no parameters; there is nothing to plan"
        raise ConfigError(msg)
    return model


def _find(target: str) -> Callable[..., Any]:
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        msg = f"--model {target!r}: expected MODULE:CALLABLE, such as package.models:GPT"
        raise ConfigError(msg)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  as `python -m` does
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:  # whatever the user's module raises
        msg = f"--model {target}: the module {name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(msg) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            msg = f"--model {target}: {found!r} has no {part!r}"
            raise ConfigError(msg)
        found = getattr(found, part)
    if not callable(found):
        msg = f"--model {target} is a {type(found).__name__}; expected a class or function that builds the model"
        raise ConfigError(msg)
    return found


def _arguments(text: str) -> tuple[Sequence[Any], dict[str, Any]]:
    try:
        given = json.loads(text)
    except ValueError as error:
        msg = f"--model-args {text!r} is no JSON: {error}"
        raise ConfigError(msg) from error
    if isinstance(given, dict):
        return (), given
    if isinstance(given, list):
        return given, {}
    msg = f"--model-args {text!r}: expected an object of keywords, or a list"
    raise ConfigError(msg)


def _sized_model(params: int, largest: int) -> nn.Module:
    """Model of equal layers of `largest` parameters and a remainder, without memory."""
    import torch
    from torch import nn

    sizes = [largest] * (params // largest) + [params % largest] * (params % largest > 0)

    class Layer(nn.Module):
        """One matrix, as vectors alone are not coded."""

        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(1, size, device="meta"))

        def forward(self, x: Any) -> Any:
            """Return `x`; never called."""
            return x

    return nn.Sequential(*(Layer(size) for size in sizes))


# -- output ------------------------------------------------------------------------------------------------------------


def _meaning(resolved: Plan) -> list[tuple[str, str]]:
    """Lines on the config's meaning: the tier of each kind of state, and the groups of ranks."""
    topology, states = resolved.topology(), resolved.states
    names = {
        "param": "parameters",
        "grad": "gradients",
        "master": "masters and optimizer states",
        "second": "second copies",
    }
    rows = [row for row in resolved.describe() if row[0] != "optimizer" or resolved.optimizer_name]
    if resolved.optimizer_name is None:
        rows.append(("optimizer", "given in code; two fp32 states for each parameter are assumed"))
    for attribute, what in names.items():
        placement = getattr(states, attribute)
        if placement is not None:
            ranks = topology.group_size(placement.axes)
            replicas = topology.group_size("data") // ranks
            kept = f", {replicas} replicas" if not placement.is_replicated and replicas > 1 else ""
            cut = "whole on every rank" if ranks == 1 else f"cut over {ranks} ranks{kept}"
            rows.append((what, cut + _tier(resolved, attribute, placement.tier.value)))
    return rows


def _tier(resolved: Plan, attribute: str, tier: str) -> str:
    """Tier of a kind of state, if not the device."""
    zero = resolved.config.zero_optimization
    words = {"device": "", "host": ", in host memory", "nvme": ", in files"}[tier]
    ratio = zero.offload_optimizer.ratio if zero.offload_optimizer is not None else 1.0
    if words and attribute in ("grad", "master") and ratio < 1:
        return f"{words} (the first {ratio:.3g} of the elements)"
    if tier == "nvme" and attribute == "param" and zero.offload_param is not None and zero.offload_param.max_in_cpu:
        return f"{words} beyond the first {format_count(zero.offload_param.max_in_cpu)} elements of each rank"
    return words


def _as_json(setup: Setup, resolved: Plan, stages: Sequence[RankBudget], verdict: Verdict, longest: int | None) -> str:
    from mpispeed.engine.estimate.feasibility import largest, train_bytes
    from mpispeed.engine.estimate.stages import by_axes, open_points

    most = largest(setup, stages)
    budget = most.budget
    tiers = sorted({row.tier.value for row in budget.held})
    answer = {
        "ok": True,
        "go": verdict.is_go,
        "reason": verdict.reason,
        "change": verdict.change,
        "params": most.params,
        "ranks": setup.ranks,
        "nodes": setup.nodes,
        "meaning": dict(_meaning(resolved)),
        "held": [{"what": row.what, "tier": row.tier.value, "bytes": row.bytes} for row in budget.held],
        "tiers": {tier: sum(row.bytes for row in budget.held if row.tier.value == tier) for tier in tiers},
        "train_bytes": train_bytes(budget),
        "build_bytes": budget.build_bytes,
        "lag_bytes": budget.lag_bytes,
        "files": {"rank_bytes": budget.file_bytes, "node_bytes": setup.ranks_per_node * budget.file_bytes},
        "moved": [
            {"what": row.what, "from": row.source.value, "to": row.target.value, "bytes": row.bytes}
            for row in budget.moved
        ],
        "sent": _rows(budget.sent),
        "axes": by_axes(budget.sent),
        "pipeline_stage": most.number,
        "pipeline_stages": [
            {
                "number": one.number,
                "params": one.params,
                "train_bytes": train_bytes(one.budget),
                "build_bytes": one.budget.build_bytes,
                "axes": by_axes(one.budget.sent),
            }
            for one in stages
        ],
        "not_exact": open_points(resolved, most),
        "activations": as_values(most.activations),
        "longest_sequence": longest,
        "owners": [asdict(row) for row in budget.owners],
        "phases": [
            {"name": phase.name, "when": phase.when, "bytes": phase.bytes, "sent": _rows(phase.sent)}
            for phase in budget.phases
        ],
        "node": {"need_bytes": verdict.need_bytes, "limit_bytes": verdict.limit.bytes, "limit": verdict.limit.source},
    }
    return json.dumps(answer, indent=1)


def _rows(sent: Sequence[Sent]) -> list[dict[str, Any]]:
    return [{"what": row.what, "verb": row.verb, "axes": list(row.axes), "bytes": row.bytes} for row in sent]


def _traffic(budget: Budget) -> list[str]:
    """A table for each kind of step; optimizers without compression have one."""
    steps = [(f"{phase.name} ({phase.when}):\n", phase.sent) for phase in budget.phases]
    found = []
    for title, sent in steps or [("", budget.sent)]:
        rows = [(row.what, row.verb, " ".join(row.axes), format_bytes(row.bytes)) for row in sent]
        rows.append(("sum", "", "", format_bytes(sum(row.bytes for row in sent))))
        found.append(title + columns(("one rank sends in a step", "verb", "over", "bytes"), rows))
    return found


def _of_stages(stages: Sequence[RankBudget]) -> str:
    """A table of what a rank of each pipeline stage needs."""
    from mpispeed.engine.estimate.feasibility import train_bytes

    rows = [
        (
            str(one.number),
            format_count(one.params),
            format_bytes(train_bytes(one.budget)),
            format_bytes(one.budget.build_bytes),
            format_bytes(one.budget.sent_bytes()),
        )
        for one in stages
    ]
    return columns(("pipeline stage", "parameters of a rank", "training", "while built", "sent in a step"), rows)


def _as_text(setup: Setup, resolved: Plan, stages: Sequence[RankBudget], verdict: Verdict, longest: int | None) -> str:
    from mpispeed.engine.estimate.feasibility import largest, train_bytes
    from mpispeed.engine.estimate.stages import by_axes, open_points

    most = largest(setup, stages)
    budget, count = most.budget, most.params
    whose = f"{format_count(count)} parameters"
    if resolved.axes["pipe"] * resolved.axes["model"] > 1:
        whose += f" on a rank of pipeline stage {most.number}, slice 0" + ", the largest" * (len(stages) > 1)
    if resolved.placing.distinct:
        whose += ", of experts those of one rank"
    held = [(row.what, row.tier.value, format_bytes(row.bytes)) for row in budget.held]
    in_memory = sum(budget.memory_bytes().values())
    held.append(("sum in memory" if budget.file_bytes else "sum", "", format_bytes(in_memory)))
    if setup.extra_bytes:
        held.append(("besides (--activations)", "host", format_bytes(setup.extra_bytes)))
    held += activation_rows(most.activations)
    held.append(("most while the model is built", "host", format_bytes(budget.build_bytes)))
    if budget.file_bytes:
        held.append(("swap files of a rank", "nvme", format_bytes(budget.file_bytes)))
        held.append(("swap files on a node", "nvme", format_bytes(setup.ranks_per_node * budget.file_bytes)))
    moved = [(row.what, row.source.value, row.target.value, format_bytes(row.bytes)) for row in budget.moved]
    axes = by_axes(budget.sent)
    if len(axes) > 1:
        tables_of_axes = [columns(("sent over", "bytes"), [(name, format_bytes(size)) for name, size in axes.items()])]
    else:
        tables_of_axes = []
    tables = [
        columns(
            ("the run", ""), [("model", whose), *_meaning(resolved), *(("matrices", str(row)) for row in budget.owners)]
        ),
        *([_of_stages(stages)] if len(stages) > 1 else []),
        columns(("one rank holds", "tier", "bytes"), held),
        *_traffic(budget),
        *tables_of_axes,
        *([columns(("one rank moves in a step", "from", "to", "bytes"), moved)] if moved else []),
    ]
    parts = [
        f"{'GO' if verdict.is_go else 'NO-GO'}: {verdict.reason}",
    ]
    if not verdict.is_go:
        parts.append(f"would fit: {verdict.change}" if verdict.change else "no change that was tried would fit")
    if longest is not None:
        parts.append(longest_sentence(resolved, longest))
    if not setup.extra_bytes and most.activations is None and train_bytes(budget):
        parts.append("not counted: activations (--activations), and what Python, torch and MPI need by themselves")
    parts += open_points(resolved, most)
    return "\n\n".join([*tables, "\n".join(parts)])


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A rich table on a terminal, plain columns elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console  # rich is slow to import and of use on terminals only
        from rich.table import Table
        from rich.text import Text

        table = Table(*head, box=None)
        for row in rows:
            table.add_row(*map(Text, row))
        console = Console()
        with console.capture() as taken:
            console.print(table)
        return taken.get().rstrip("\n")
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(line.rstrip() for line in lines)
