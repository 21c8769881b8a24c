"""The section `elasticity`: from settings to batch sizes and allowed numbers of ranks."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from typing import Any

from mpispeed.base.errors import (
    ConfigError,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from mpispeed.base.version import VERSION
from mpispeed.config.elastic import Elasticity
from mpispeed.config.elastic_solve import Choice, Demand, pick_micro, solve, solve_here, solve_nodes
from mpispeed.config.load import INLINE, validate

log = logging.getLogger(__name__)

SCHEDULED = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable with the section, as JSON, with which a scheduler chose the number of ranks."""

SUPERVISED = "MPISPEED_ELASTIC"
"""Variable by which `mpispeed run --elastic` declares that it keeps to the numbers of the section."""

OLDEST = (0, 3, 8)
"""Versions of DeepSpeed before this one have no elasticity."""


def read_section(settings: Mapping[str, Any], where: str = INLINE) -> Elasticity:
    """The validated section of a whole configuration; it must be there and enabled.

    Raises:
        ElasticityConfigError: it is missing, off, incomplete or wrong.
    """
    found = settings.get("elasticity")
    try:
        section = validate({} if found is None else {"elasticity": found}, where).config.elasticity
    except ConfigError as error:
        raise ElasticityConfigError(str(error)) from None
    return require_enabled(section, where)


def require_enabled(section: Elasticity, where: str = INLINE) -> Elasticity:
    """The section, if it is enabled.

    Raises:
        ElasticityConfigError: it is missing or off.
    """
    if not section.enabled:
        is_there = bool(section.model_fields_set)
        what = "elasticity.enabled is false; set it to true" if is_there else "there is no section elasticity"
        msg = f"{where}: {what}{'' if is_there else '; add it with max_train_batch_size and micro_batch_sizes'}"
        raise ElasticityConfigError(msg)
    return section


def demand_of(section: Elasticity) -> Demand:
    """The plain numbers of a section."""
    return Demand(
        max_batch=section.max_train_batch_size,
        micro_batches=tuple(section.micro_batch_sizes),
        least=section.min_gpus,
        most=section.max_gpus,
        prefers_larger=section.prefer_larger_batch,
        sharing=section.model_parallel_size,
        per_node=section.num_gpus_per_node,
    )


def choose(section: Elasticity, ranks: int | None = None) -> Choice:
    """Choose the batch and numbers of data-parallel ranks; version 0.2 also allows other numbers, given as `ranks`.

    Raises:
        ElasticityError: there is no such batch.
    """
    demand = demand_of(section)
    if section.version < 0.2:
        return solve(demand)
    return solve_nodes(demand) if ranks is None else solve_here(demand, ranks)


def find_surprises(section: Elasticity, choice: Choice) -> list[str]:
    """Sentences about a legal choice with unexpected results."""
    if choice.batch <= section.max_train_batch_size:
        return []
    return [
        f"elasticity: the batch of {choice.batch} samples is more than max_train_batch_size "
        f"{section.max_train_batch_size}: all micro_batch_sizes divide it, and no smaller one has more numbers of ranks"
    ]


def elastic_counts(section: Mapping[str, Any]) -> list[int]:
    """Numbers of ranks on which a run keeps its batch size, ascending; `section` is `elasticity` of the file.

    Raises:
        ElasticityConfigError: the section is off, incomplete or wrong.
        ElasticityError: no number of ranks is left.
    """
    found = read_section({"elasticity": section})
    return [found.model_parallel_size * count for count in choose(found).counts]


def elastic_triple(section: Elasticity, ranks: int, data: int) -> tuple[int, int, int]:
    """(train batch, micro-batch, accumulation steps) on `ranks` ranks; `data` of them see different samples.

    Raises:
        ElasticityConfigError: `model_parallel_size` is not how many ranks share a model.
        ElasticityIncompatibleWorldSize: the section does not allow so many ranks.
        ElasticityError: there is no batch for it.
    """
    sharing = ranks // data
    if section.model_parallel_size != sharing:
        what = f"elasticity.model_parallel_size is {section.model_parallel_size}, and {sharing} of {ranks} ranks"
        cure = f"set it to {sharing}" if section.version >= 0.2 or sharing == 1 else f"set it to {sharing}, version 0.2"
        msg = f"{what} share each sample (pipeline stages x ranks per sequence x slices of layers); {cure}"
        raise ElasticityConfigError(msg)
    choice = choose(section, ranks)
    _require_allowed(choice, ranks, sharing)
    micro = pick_micro(choice.batch, data, section.micro_batch_sizes)
    return choice.batch, micro, choice.batch // (micro * data)


def _require_allowed(choice: Choice, ranks: int, sharing: int) -> None:
    if ranks % sharing == 0 and choice.has(ranks // sharing):
        return
    allowed = [sharing * count for count in choice.counts]
    lower, upper = [n for n in allowed if n < ranks][-1:], [n for n in allowed if n > ranks][:1]
    msg = (
        f"{ranks} ranks do not divide the batch of {choice.batch} samples that elasticity chose; start "
        f"{' or '.join(map(str, lower + upper))} ranks (`mpispeed elastic -c CONFIG` lists all numbers)"
    )
    raise ElasticityIncompatibleWorldSize(msg)


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Batch size and numbers of data-parallel ranks of a configuration with the section `elasticity`.

    Args:
        ds_config: the whole configuration.
        target_deepspeed_version: refused if it is older than 0.3.8; this package's own version is none of those.
        world_size: ranks of the run; 0: not known (version 0.2 then reads the variable WORLD_SIZE).
        return_microbatch: also return the samples of one forward pass.

    Returns:
        (batch, numbers), with `world_size` or `return_microbatch` (batch, numbers, micro-batch).

    Raises:
        ElasticityConfigError: the section is missing, off, incomplete or wrong, or the world size is needed.
        ElasticityIncompatibleWorldSize: the section does not allow `world_size` ranks.
        ElasticityError: there is no such batch, or the version is too old.
    """
    if not isinstance(ds_config, Mapping):
        msg = f"expected the configuration as a dict, found {type(ds_config).__name__}"
        raise ElasticityConfigError(msg)
    _require_version(target_deepspeed_version)
    section = read_section(ds_config)
    is_old = section.version < 0.2
    ranks = world_size or (0 if is_old else _ranks_of_job())
    choice = choose(section, ranks or None)
    for sentence in find_surprises(section, choice):
        log.warning("%s", sentence)
    numbers, sharing = list(choice.counts), section.model_parallel_size
    if world_size:
        _require_allowed(choice, world_size, sharing)
    elif not return_microbatch:
        return choice.batch, numbers
    if not ranks:
        msg = "return_microbatch needs the number of ranks in version 0.1; pass world_size"
        raise ElasticityConfigError(msg)
    prefers = bool(world_size) or is_old or section.prefer_larger_batch
    micro = pick_micro(choice.batch, ranks // sharing, section.micro_batch_sizes, prefers_larger=prefers)
    return choice.batch, numbers, micro


def _ranks_of_job() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        msg = (
            f"elasticity version 0.2 needs the number of ranks: pass world_size, or set WORLD_SIZE (it is {text!r} in "
            "the environment)"
        )
        raise ElasticityConfigError(msg)
    return int(text)


def _require_version(version: str) -> None:
    parts = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if not version or (parts and tuple(int(part or 0) for part in parts.groups()) >= OLDEST):
        return
    if parts and version == VERSION:
        return
    msg = f"target_deepspeed_version is {version!r}; elasticity needs 0.3.8 or newer"
    raise ElasticityError(msg)


def find_run_warnings(section: Elasticity, ranks: int) -> list[str]:
    """Warnings for a run on `ranks` ranks: those of `find_surprises`, and if its batch is not the usual one.

    Raises:
        ElasticityError: as `choose`.
    """
    choice, usual = choose(section, ranks), choose(section)
    found = find_surprises(section, choice)
    if choice.batch != usual.batch:
        found.append(
            f"elasticity: {ranks} ranks are none of those that share a batch of {usual.batch} samples; on them it is "
            f"{choice.batch}"
        )
    return found


def check_schedule(section: Elasticity, environ: Mapping[str, str]) -> list[str]:
    """Compare the section with the one from which the scheduler chose the number of ranks; a warning if there is none.

    Raises:
        ElasticityConfigError: they differ in what decides the batch size.
    """
    text = environ.get(SCHEDULED)
    if text is None:
        if environ.get(SUPERVISED) == "1":
            return []
        return [f"elasticity: {SCHEDULED} is not set, so a scheduler may start other numbers of ranks"]
    try:
        scheduled = json.loads(text)
    except ValueError as error:
        msg = f"{SCHEDULED} in the environment is no JSON: {error}; it has to be the section elasticity"
        raise ElasticityConfigError(msg) from None
    known = read_section({"elasticity": scheduled}, SCHEDULED)
    for key in ("max_train_batch_size", "micro_batch_sizes", "version"):
        ours, theirs = getattr(section, key), getattr(known, key)
        if ours != theirs:
            msg = (
                f"elasticity.{key} is {ours}, and the scheduler chose the number of ranks for {theirs} "
                f"({SCHEDULED} in the environment); start the run with the settings that the scheduler has"
            )
            raise ElasticityConfigError(msg)
    return []
