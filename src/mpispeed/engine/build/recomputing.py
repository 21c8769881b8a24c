"""Activation checkpointing as a config asks for it: that of an engine, or one that a script gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.site_file import current
from mpispeed.config import added, legacy
from mpispeed.config.load import INLINE
from mpispeed.config.problems import find_too_deep, refuse
from mpispeed.config.section import knows, text_keys
from mpispeed.config.site import lay_section_under
from mpispeed.nn import activation_checkpointing, checkpointing_options
from mpispeed.nn.checkpointing_options import SECTION

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan

_made: activation_checkpointing.Checkpointer | None = None
"""The checkpointer configured by an engine: the next engine may replace it, but not one configured by the script."""


def configure_recomputation(plan: Plan, mesh: Mesh, *, micro_batches: int = 1) -> None:
    """Set the options of `mpispeed.checkpointing`, unless the script has set its own.

    Args:
        plan: the settings.
        mesh: the ranks.
        micro_batches: the most that are between their forward and backward passes at once.

    Raises:
        ConfigError: options do not fit together.
    """
    global _made
    section, comm = plan.config.activation_checkpointing, mesh["model"]
    is_own = activation_checkpointing.is_configured() and activation_checkpointing.current() is not _made
    is_asked = section != type(section).model_validate({}) or comm.size > 1
    if not is_own and (is_asked or _made is not None):
        activation_checkpointing.configure(
            comm if comm.size > 1 else None,
            partition_activations=section.partition_activations,
            contiguous_memory_optimization=section.contiguous_memory_optimization,
            number_checkpoints=section.number_checkpoints and section.number_checkpoints * micro_batches,
            cpu_checkpointing=section.cpu_checkpointing,
            synchronize_checkpoint_boundary=section.synchronize_checkpoint_boundary,
            profile=section.profile,
        )
        _made = activation_checkpointing.current()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    strict_partition: bool | None = None,
) -> None:
    """Set all options: to their defaults, then to those of the configuration, then to the arguments that are not None.

    With a configuration the site's file counts as in `initialize`: its section `activation_checkpointing` is under all
    of them, and what it locks is refused at another value, also in an argument. It is what an `initialize` before has
    read, else each rank reads it. All ranks of a slicing group have to set the same options. Calls that are under way
    go on as they began.

    Args:
        mpu_: the slicing group, a `Comm`, or an object with `get_tensor_model_parallel_group` or
            `get_model_parallel_group` that gives it, or None: activations are not sliced.
        deepspeed_config: a mapping, a path of a JSON file, or an object with the section `activation_checkpointing`,
            which is taken as it is.
        partition_activations: keep a slice of each activation on every rank of the slicing group.
        contiguous_checkpointing: keep activations in one buffer; needs the former and the next.
        num_checkpoints: calls that are checkpointed before any of their backward passes has run.
        checkpoint_in_cpu: keep activations in host memory.
        synchronize: wait for the device at each end of each pass of a call.
        profile: time the passes of each call and log them; see `timers`.
        strict_partition: refuse activations that the slicing group does not divide, instead of padding.

    Raises:
        ConfigError: options do not fit together, one is locked, the site's file is wrong, or `mpu_` gives no slicing
            group. Nothing is changed then.
    """
    arguments: dict[str, Any] = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
        "strict_partition": strict_partition,
    }
    config: Any = deepspeed_config
    of_site: dict[str, str] = {}
    if isinstance(config, (str, Path, Mapping)):
        given = {key: value for key, value in arguments.items() if value is not None}
        config, of_site = _with_site(config, given)
    try:
        activation_checkpointing.configure(mpu_, config, **arguments)
    except ConfigError as error:
        words = re.findall(r"\w+", str(error))
        named = sorted(path for path in of_site if path.rpartition(".")[2] in words)
        if not named:
            raise
        msg = f"{error} ({', '.join(named)}: from the {of_site[named[0]]})"
        raise ConfigError(msg) from None


def _with_site(config: str | Path | Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """A configuration with the site's defaults under its section, and which of its settings are the site's.

    Args:
        config: a mapping, or the path of a file.
        arguments: those of `configure` by their keys, which are over it.

    Raises:
        ConfigError: the file cannot be read, a locked option is changed, or the site's file is wrong.
    """
    where = INLINE if isinstance(config, Mapping) else str(config)
    content = config if isinstance(config, Mapping) else checkpointing_options.read_file(config)
    section = content.get(SECTION, {}) if isinstance(content, Mapping) else None
    if not isinstance(section, Mapping):
        return content, {}
    problems = find_too_deep(section)
    if problems:
        raise refuse(where, problems)
    done = legacy.translate({SECTION: section}, text_keys(added.root()), partial(knows, added.root()))
    own = dict(done.data[SECTION])
    for key, value in arguments.items():
        done.data[SECTION][key] = value
        done.spelled[f"{SECTION}.{key}"] = f"argument {_ARGUMENTS.get(key, key)}"
    if (site := current()).path:
        lay_section_under(done, site, SECTION)
    if done.problems:
        raise refuse(where, done.problems)
    laid = {path.rpartition(".")[2] for path in done.of_site}
    options = {**own, **{key: value for key, value in done.data[SECTION].items() if key in laid}}
    return {SECTION: options}, done.of_site


_ARGUMENTS = {
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
}
"""Key -> the argument of `configure` that it is."""
