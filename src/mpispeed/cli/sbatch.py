"""`mpispeed sbatch`: a batch script from a template, a site's profile, a config and a plan; checked, then submitted.

Exit codes: 0 submitted (or shown, or written), 1 the plan says NO-GO, 2 the question is wrong or a check has failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.plain import printable
from mpispeed.base.units import format_bytes
from mpispeed.cli.batch import fields_of, show, with_resources, write
from mpispeed.cli.plan import Count

if TYPE_CHECKING:
    from mpispeed.launch.sbatch import Request
    from mpispeed.launch.sites import Site
    from mpispeed.launch.submit import Partition

PROCESS_BYTES = 1 << 30
"""Memory set aside for each rank's Python, torch and MPI; a rank without a model was seen to take 270 MiB on a CPU."""

SLACK = 1.2
"""Factor of a job's memory over the plan's."""

_UNKNOWN = 1 << 60


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@with_resources
@click.option(
    "--template",
    metavar="NAME|FILE",
    default="",
    help="single, multi, array, requeue, container, torch, generate, tune, data, or a file; by default what fits.",
)
@click.option("--mem", type=Count(), help="Memory of a node, such as 100GiB; default: from the plan.")
@click.option("--partition", "-p", default="", help="Default: the site's.")
@click.option("--qos", "-q", default="", help="Default: the site's.")
@click.option("--array", "-a", default="", help="Tasks, such as 0-9%2; {task} in an argument is the number.")
@click.option("--image", default="", help="Run in a container of this image (template container).")
@click.option("--python", default="", help="The interpreter; default: this one, in a container python3.")
@click.option(
    "--signal-seconds",
    type=click.IntRange(min=0),
    help="USR1 so long before the limit; default: 120, less in short jobs, where the config saves at USR1; else none.",
)
@click.option("--flag", "flags", multiple=True, metavar="--NAME=VALUE", help="Further flag of sbatch; repeatable.")
@click.option("--stage-env", is_flag=True, help="Unpack the environment on each node; the ranks start from there.")
@click.option("--stage-dir", default="", metavar="FOLDER", help="With --stage-env: folder of each node to unpack to.")
@click.option("--config", type=click.Path(), help="Checked, planned, and given to SCRIPT as --deepspeed_config.")
@click.option("--ranks-per-model", type=click.IntRange(min=1),
              help="Ranks that share each model, where the script decides it, not the config.")  # fmt: skip
@click.option("--no-plan", is_flag=True, help="Submit without asking whether memory will do.")
@click.option("--model", "target", metavar="MODULE:CALLABLE", help="For the plan: what builds the model.")
@click.option("--model-args", default="{}", metavar="JSON", help="Its arguments.")
@click.option("--params", type=Count(), help="Instead of --model: parameters of the model, such as 7e9.")
@click.option("--largest-layer", type=Count(), help="With --params: parameters of the largest layer.")
@click.option("--zero-init", is_flag=True, help="The model is built inside of mpispeed.zero.Init.")
@click.option("--activations", type=Count(), default=0, help="Bytes each rank needs besides, such as activations.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def sbatch(script: str, arguments: tuple[str, ...], **asked: Any) -> None:
    """Submit SCRIPT with its arguments as a batch job; options of this command come before SCRIPT.

    `mpispeed sbatch [OPTIONS] generate --model ...` submits `mpispeed generate`, `... tune CONFIG SCRIPT ...`
    `mpispeed tune`, `... data build ...` `mpispeed data build`.
    """
    from mpispeed.launch.sbatch import COMMANDS, choose_template, fill, values_of
    from mpispeed.launch.sites import chosen_site
    from mpispeed.launch.submit import ask_partition, check_script

    if script not in COMMANDS and not Path(script).is_file():
        msg = f"there is no script {script} (looked from {Path.cwd()}); give its path"
        raise UsageError(msg)
    site = chosen_site(asked["site"])
    partition = ask_partition(asked["partition"] or site.partition)
    words, config = _with_config(script, arguments, site, asked)
    request = _request(words, config, site, asked)
    template = choose_template(request)
    _check_chain(config, template)
    request = _with_memory(request, config, template, site, partition, asked)
    text = fill(template, values_of(request, site, partition))
    show(text, check_script(text), is_dry=asked["dry_run"])
    if not asked["dry_run"]:
        _deliver(text, request, asked["output"], config)


# -- request ---------------------------------------------------------------------------------------------------------


def _with_config(script: str, arguments: Sequence[str], site: Site, asked: dict[str, Any]) -> tuple[list[str], Any]:
    """The words of a rank, and the settings, as a run would accept them, if they are in a file that can be found."""
    from mpispeed.launch.sbatch import COMMANDS
    from mpispeed.launch.scale import CONFIG_FLAGS

    words, file = [script, *arguments], asked["config"]
    if script in COMMANDS:
        if file:
            msg = f"--config before {script} would be that of a training; give what {script} needs after it"
            raise UsageError(msg)
        return words, None
    if file:
        words += ["--deepspeed_config", file]
    else:
        file = next((word for flag, word in _pairs(arguments) if flag in CONFIG_FLAGS), None)
        if file is None or not Path(file).is_file():  # written by the script, or one for each task of an array
            why = "none is given" if file is None else f"there is no file {printable(file)}"
            cure = "give it with --config to have it checked here; the job may still refuse it"
            click.echo(f"no config is checked, and memory is not planned: {why}; {cure}", err=True)
            return words, None
    ranks = (asked["ntasks_per_node"] or site.ranks_per_node or 1) * asked["nodes"]
    is_other = any(flag.startswith(("--ntasks", "--nodes")) for flag in asked["flags"])
    loaded = _load(file, None if is_other else ranks, asked["ranks_per_model"] or 0)
    for warning in loaded.warnings:
        click.echo(f"{printable(loaded.where)}: warning: {printable(warning)}", err=True)
    return words, loaded.config


def _load(file: str, ranks: int | None, sharing: int) -> Any:
    """The settings, as a run on so many ranks would accept them; None: their number is unknown."""
    from mpispeed.config import load_for_run

    try:
        return load_for_run(file, ranks, sharing)
    except ConfigError as error:
        if sharing or _error_of(file) == str(error):
            raise
        msg = f"{error}; if ranks share each model, say how many with --ranks-per-model"
        raise ConfigError(msg) from None


def _error_of(file: str) -> str:
    """Mistakes in settings on any number of ranks."""
    from mpispeed.config import load_for_run

    try:
        load_for_run(file)
    except ConfigError as error:
        return str(error)
    return ""


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """(flag, value) of `--flag value` and `--flag=value`."""
    joined = [tuple(word.split("=", 1)) for word in words if word.startswith("--") and "=" in word]
    return [(pair[0], pair[1]) for pair in joined] + list(pairwise(words))


def _saves_in_time(config: Any) -> bool:
    section = getattr(config, "walltime", None)
    return section is not None and section.enabled and section.save_dir is not None


def _request(words: Sequence[str], config: Any, site: Site, asked: dict[str, Any]) -> Request:
    from mpispeed.launch.sbatch import COMMANDS, Request, signal_seconds

    requeues = _saves_in_time(config) and config.walltime.chain == "requeue"
    # A script that does not wait for it would die of the signal, before its time.
    saves_at_signal = words[0] in COMMANDS or (_saves_in_time(config) and "USR1" in config.walltime.signals)
    seconds = asked["signal_seconds"]
    if seconds is None:
        seconds = signal_seconds(asked["time_limit"] or site.time) if saves_at_signal else 0
    return Request(
        **fields_of(words, asked, site), template=asked["template"], partition=asked["partition"], qos=asked["qos"],
        array=asked["array"], image=asked["image"], requeues=requeues, signal_seconds=seconds,
        python=asked["python"] or ("python3" if asked["image"] else sys.executable), saves_at_signal=saves_at_signal,
        is_staged=asked["stage_env"], staged_place=asked["stage_dir"],
    )  # fmt: skip


def _check_chain(config: Any, template: str) -> None:
    """Refuse two ways to continue a run: two jobs would write the same checkpoints."""
    if not _saves_in_time(config):
        return
    chain = config.walltime.chain
    if chain == "requeue" and template in ("single", "multi", "array", "torch"):
        msg = (
            f'walltime.chain in the config is "requeue", and the template {template} does not requeue; '
            'leave out --template, or set it to "dependency"'
        )
        raise UsageError(msg)
    if chain == "dependency" and template in ("requeue", "container"):
        msg = (
            f'walltime.chain in the config is "dependency", and the template {template} requeues; set it to "requeue" '
            "(there is no sbatch in a container)"
        )
        raise UsageError(msg)


# -- the plan --------------------------------------------------------------------------------------------------------


def _with_memory(
    request: Request, config: Any, template: str, site: Site, partition: Partition, asked: dict[str, Any]
) -> Request:
    """The request with the plan's memory; ends the program on NO-GO."""
    has_model = asked["target"] is not None or asked["params"] is not None
    gpus = site.gpus_per_node if request.gpus_per_node is None else request.gpus_per_node
    if asked["no_plan"] or config is None:
        return request
    if not has_model or gpus:
        why = (
            "give the model with --model, or --params and --largest-layer" if not has_model
            else "memory of GPUs is not planned"
        )  # fmt: skip
        click.echo(f"memory is not planned: {why}", err=True)
        return request
    from dataclasses import replace

    from mpispeed.cli.plan import forecast, make_model
    from mpispeed.engine.estimate.feasibility import Limit, Setup

    ranks = request.ranks_per_node or site.ranks_per_node or 1
    known = {"--mem": request.memory_bytes, site.name: site.memory_bytes, "SLURM": partition.memory_per_node_bytes}
    source, most = next(((name, value) for name, value in known.items() if value), ("no limit is known", _UNKNOWN))
    aside = ranks * PROCESS_BYTES
    limit = Limit(f"{source}, less {format_bytes(aside)} for Python, torch and MPI", max(0, most - aside))
    setup = Setup(config, ranks * request.nodes, request.nodes, asked["zero_init"], asked["activations"])
    model = make_model(asked["target"], asked["model_args"], asked["params"], asked["largest_layer"])
    verdict = forecast(setup, model, [limit])[2]
    click.echo(f"{'GO' if verdict.is_go else 'NO-GO'}: {verdict.reason}", err=True)
    if not verdict.is_go:
        click.echo(f"would fit: {verdict.change}" if verdict.change else "no change that was tried would fit", err=True)
        sys.exit(1)
    if request.memory_bytes or template == "multi":  # which gets whole nodes
        return request
    return replace(request, memory_bytes=min(most, int(verdict.need_bytes * SLACK) + aside))


# -- results ---------------------------------------------------------------------------------------------------------


def _deliver(text: str, request: Request, output: Path | None, config: Any) -> None:
    """Write the script, and submit it unless only the script is wanted."""
    from mpispeed.launch.submit import submit

    target = write(text, request.run_folder, "job.sbatch", output, "sbatch")
    if target is None:
        return
    job = submit(target)
    click.echo(f"job {job}, {request.job_name}; logs and reports in {request.run_folder}")
    folder = request.run_folder / ("task-N" if request.array else "")
    click.echo(_how_to_ask(folder, config, request))


def _how_to_ask(folder: Path, config: Any, request: Request) -> str:
    """The way to request a save of the running job; if it does not listen, the settings that it would need."""
    if request.words[0] == "tune":
        return "scancel ends the search; submitted again it goes on after what was tried"
    if request.words[0] == "data":
        return "scancel ends it; a build that is submitted again goes on after what is done"
    if request.words[0] == "generate":
        return f"to stop after the batches that run: touch {folder}/STOP"
    if _saves_in_time(config):
        return f"to save and stop: touch {folder}/STOP; to save and go on: touch {folder}/SAVE"
    if config is None:
        return f"where the script's config has walltime.save_dir, touch {folder}/STOP saves and stops"
    return "the job cannot be asked to save: its config has no walltime.save_dir; scancel ends it as it stands"
