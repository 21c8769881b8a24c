"""Profiles of sites: facts on a cluster for batch jobs, as TOML."""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mpispeed.base import assets
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.site_file import current
from mpispeed.base.units import parse_count, parse_duration

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same under its older name
    import tomli as tomllib


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a partition; None if unknown. `max_time` is written as in sbatch."""

    max_time: str | None = None
    max_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Contents of a profile; everything may be left out.

    Attributes:
        name: the name or path it was found by, for messages.
        description: one line for people.
        partition, account, qos: as in sbatch.
        sbatch_flags: further flags of sbatch, such as --constraint=gpu.
        time: the time limit of a job without one.
        max_time, max_nodes: limits of a job if its partition has none.
        mpi_plugin: value of srun --mpi.
        srun_flags: further flags of srun.
        modules, setup: modules to load, and lines of shell before the start.
        ranks_per_node, cores_per_node, gpus_per_node: of a node.
        memory_per_node: memory of a node for jobs, such as "240GiB".
        scratch: folder for run folders; variables are replaced.
        container_command, container_flags: command that enters a container.
        partitions: their own limits.
    """

    name: str = ""
    description: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    sbatch_flags: tuple[str, ...] = ()
    time: str = ""
    max_time: str = ""
    max_nodes: int = 0
    mpi_plugin: str = ""
    srun_flags: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    ranks_per_node: int = 0
    cores_per_node: int = 0
    gpus_per_node: int = 0
    memory_per_node: str = ""
    scratch: str = ""
    container_command: str = "apptainer"
    container_flags: tuple[str, ...] = ()
    partitions: Mapping[str, Limits] = field(default_factory=dict)

    def limits(self, partition: str) -> Limits:
        """Limits of a job in this partition."""
        own = self.partitions.get(partition, Limits())
        return Limits(own.max_time or self.max_time or None, own.max_nodes or self.max_nodes or None)

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a node that a job can have."""
        return parse_count(self.memory_per_node) if self.memory_per_node else None

    @property
    def shell_lines(self) -> list[str]:
        """Lines of shell that a batch script runs before the start."""
        return [*(f"module load {module}" for module in self.modules), *self.setup]


def seconds_of(text: str) -> float:
    """Seconds of a time limit as SLURM writes it: a plain number is minutes.

    Raises:
        ValueError: it is none.
    """
    text = text.strip()
    return 60.0 * int(text) if text.isdigit() else parse_duration(text)


def lines_of(flags: list[str]) -> list[str]:
    """Flags for the head of a batch script, one in a line.

    Raises:
        ConfigError: one has a line break: the shell of the job would run what stands behind it.
    """
    for flag in flags:
        if not flag.isprintable():
            msg = f"the flag {flag!r} of the batch job has a line break or a control character; take it out"
            raise ConfigError(msg)
    return flags


def chosen_site(name: str | None, environ: Mapping[str, str] | None = None) -> Site:
    """The profile of that name, or that of the site file, or an empty one; with the variables of the site file.

    Raises:
        UsageError: as `find_site`.
        ConfigError: as `find_site`, or the site file is wrong.
    """
    environ = os.environ if environ is None else environ
    file = current(environ)
    name = name or file.profile
    site = find_site(name, environ) if name else Site()
    lines = (f"export {variable}=${{{variable}-{shlex.quote(value)}}}" for variable, value in file.environment.items())
    return replace(site, setup=(*lines, *site.setup))


def find_site(name: str, environ: Mapping[str, str] | None = None) -> Site:
    """Find a profile: a file, or a name in the folder of MPISPEED_SITES, of the user, or among the shipped ones.

    Raises:
        UsageError: there is no such profile, or it cannot be read.
        ConfigError: it says something that profiles do not say.
    """
    environ = os.environ if environ is None else environ
    if "/" in name or name.endswith(".toml"):
        return _read(Path(name).expanduser())
    home = environ.get("XDG_CONFIG_HOME") or "~/.config"
    folders = [Path(home).expanduser() / "mpispeed" / "sites", assets.folder("slurm") / "sites"]
    if environ.get("MPISPEED_SITES"):
        folders.insert(0, Path(environ["MPISPEED_SITES"]).expanduser())
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return _read(folder / f"{name}.toml")
    known = sorted({file.stem for folder in folders for file in folder.glob("*.toml")})
    msg = f"there is no site profile {name!r}; known are {', '.join(known)}, or give the path of a file ending in .toml"
    raise UsageError(msg)


def _read(path: Path) -> Site:
    try:
        entries = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        msg = f"the site profile {path} cannot be read: {error}"
        raise UsageError(msg) from error
    partitions = _take_table(path, entries)
    values = {key: _checked(path, key, value) for key, value in entries.items()}
    return Site(**{**values, "name": str(path), "partitions": partitions})


def _take_table(path: Path, entries: dict[str, Any]) -> dict[str, Limits]:
    table = entries.pop("partitions", {})
    found = {}
    for name, limits in table.items() if isinstance(table, dict) else [("", table)]:
        if not isinstance(limits, dict) or set(limits) - {"max_time", "max_nodes"}:
            msg = f"{path}: partitions.{name} is {limits!r}; expected a table with max_time and max_nodes"
            raise ConfigError(msg)
        found[name] = Limits(**{key: _checked(path, key, value) for key, value in limits.items()})
    return found


def _checked(path: Path, key: str, value: Any) -> Any:
    """Return a value if it is of the key's kind; lists become tuples."""
    kinds: dict[str, Any] = {
        item.name: type(item.default) for item in fields(Site) if item.name not in ("name", "partitions")
    }
    if key not in kinds:
        near = difflib.get_close_matches(key, kinds, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(kinds))}"
        msg = f"{path}: {key!r} is nothing a site profile says; {hint}"
        raise ConfigError(msg)
    kind = kinds[key]
    if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind is tuple or not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
        wanted = {tuple: "a list of texts", str: "a text", int: "a whole number"}[kind]
        msg = f"{path}: {key} is {value!r}; expected {wanted}"
        raise ConfigError(msg)
    try:
        if value and key in ("time", "max_time"):
            seconds_of(value)
        if value and key == "memory_per_node":
            parse_count(value)
    except ValueError as error:
        msg = f"{path}: {key}: {error}"
        raise ConfigError(msg) from error
    return value
