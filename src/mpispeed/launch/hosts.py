"""Hosts of a job: host files, filters, and the slots used on each.

A slot is the place of one rank on a host, and the number of the accelerator that the rank there uses.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpispeed.base.errors import ConfigError

HERE = "localhost"

_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?")
_OF_SLURM = re.compile(r"([^,\[\]]+)(?:\[([\d,-]+)\])?(?:,|$)")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?(?:,|$)")

Slots = dict[str, tuple[int, ...]]
"""Slots by host, in the order in which ranks are placed."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host and the slots used there, one rank in each."""

    name: str
    slots: tuple[int, ...]

    @property
    def devices(self) -> str | None:
        """Accelerators for CUDA_VISIBLE_DEVICES; None where rank k of the host takes device k anyway."""
        if self.slots == tuple(range(len(self.slots))):
            return None
        return ",".join(map(str, self.slots))


def read_hostfile(path: Path) -> Slots:
    """The hosts in a file.

    Raises:
        ConfigError: the file cannot be read, or a line is wrong.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"the host file {path} cannot be read: {error}; write it, or leave --hostfile out to run on this machine"
        raise ConfigError(msg) from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, where: str) -> Slots:
    """The hosts in lines "NAME slots=N"; blank lines and those that begin with # are skipped.

    Raises:
        ConfigError: naming `where` and the line.
    """
    hosts: Slots = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words or words.startswith("#"):
            continue
        match = _LINE.fullmatch(words)
        if match is None or int(match[2]) < 1:
            msg = f"{where}, line {number}: {words!r} is not a host; write NAME slots=N with N of at least 1"
            raise ConfigError(msg)
        if match[1] in hosts:
            msg = f"{where}, line {number}: {match[1]} was named before; give a host one line with all its slots"
            raise ConfigError(msg)
        hosts[match[1]] = tuple(range(int(match[2])))
    if not hosts:
        msg = f"{where} names no host; write one per line: NAME slots=N"
        raise ConfigError(msg)
    return hosts


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...] | None]:
    """Slots by host of a filter NAME[:SLOT[,SLOT...]][@...]; None for all slots of a host.

    Raises:
        ConfigError: the text is no filter.
    """
    chosen: dict[str, tuple[int, ...] | None] = {}
    for node in text.split("@"):
        name, colon, rest = node.strip().partition(":")
        slots = rest.split(",") if colon else []
        if not name or ":" in rest or not all(word.isascii() and word.strip().isdigit() for word in slots):
            msg = f"{option} {text!r}: {node!r} is not NAME or NAME:SLOT,SLOT; separate hosts by @, as in h1@h2:0,1"
            raise ConfigError(msg)
        known = chosen.get(name, ())
        if not colon or known is None:
            chosen[name] = None
        else:
            chosen[name] = tuple(sorted({*known, *map(int, slots)}))
    return chosen


def filter_hosts(hosts: Slots, include: str = "", exclude: str = "") -> Slots:
    """Apply a filter to the hosts, in their order; hosts without a slot left disappear.

    Raises:
        ConfigError: both filters are given, or one names a host or a slot that is not there.
    """
    if include and exclude:
        msg = f"--include {include} and --exclude {exclude} exclude each other; give one of them"
        raise ConfigError(msg)
    if not include and not exclude:
        return dict(hosts)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    named = parse_filter(text, option)
    for name, slots in named.items():
        if name not in hosts:
            msg = f"{option} {text}: there is no host {name}; there are {', '.join(hosts)}"
            raise ConfigError(msg)
        strange = sorted({*(slots or ())} - {*hosts[name]})
        if strange:
            msg = f"{option} {text}: {name} has no slot {strange[0]}; it has {', '.join(map(str, hosts[name]))}"
            raise ConfigError(msg)
    left = {}
    for name, slots in hosts.items():
        if include:
            kept = slots if named.get(name, ()) is None else named.get(name, ())
        else:
            gone = slots if named.get(name, ()) is None else named.get(name, ())
            kept = tuple(slot for slot in slots if slot not in (gone or ()))
        if kept:
            left[name] = tuple(kept)
    return left


@dataclass(frozen=True, slots=True)
class Choice:
    """The user's choice among the hosts."""

    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude) or self.num_nodes is not None or self.num_gpus is not None

    def check(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ConfigError: naming the options.
        """
        counts = {"--num_nodes": self.num_nodes, "--num_gpus": self.num_gpus}
        filters = [
            f"{name} {text}" for name, text in (("--include", self.include), ("--exclude", self.exclude)) if text
        ]
        for name, count in counts.items():
            if count is not None and filters:
                msg = f"{name} {count} cannot be combined with {filters[0]}: the filter names hosts and slots already"
                raise ConfigError(msg)
            if count is not None and count < 1:
                msg = f"{name} is {count}; give at least 1, or leave it out for all"
                raise ConfigError(msg)
        if len(filters) > 1:
            msg = f"{filters[0]} and {filters[1]} exclude each other; give one of them"
            raise ConfigError(msg)

    def of(self, hosts: Slots, where: str) -> tuple[Host, ...]:
        """Return the chosen part of the hosts; `where` is their source, for messages.

        An include may name slots beyond those of the host file: they are numbers of accelerators, and a machine
        can have more of them than the file allows ranks.

        Raises:
            ConfigError: the choice does not fit the hosts.
        """
        self.check()
        if self.include:
            named = parse_filter(self.include, "--include")
            hosts = {name: tuple(sorted({*slots, *(named.get(name) or ())})) for name, slots in hosts.items()}
        left = filter_hosts(hosts, self.include, self.exclude)
        if not left:
            msg = f"--exclude {self.exclude} leaves no slot of {', '.join(hosts)} ({where})"
            raise ConfigError(msg)
        if self.num_nodes is not None and self.num_nodes > len(left):
            msg = f"--num_nodes is {self.num_nodes}, but {where} has only {len(left)} hosts: {', '.join(left)}"
            raise ConfigError(msg)
        names = list(left)[: self.num_nodes]
        replaced = None if self.num_gpus is None else tuple(range(self.num_gpus))
        return tuple(Host(name, left[name] if replaced is None else replaced) for name in names)


def choose_here(choice: Choice, ranks: int | None) -> tuple[Host, ...]:
    """The chosen slots of this machine, where there is no host file; empty if nothing was chosen.

    Raises:
        ConfigError: the choice names another host, or several.
    """
    choice.check()
    if not choice:
        return ()
    if (choice.num_nodes or 1) > 1:
        msg = f"--num_nodes is {choice.num_nodes}, but there is no host file to take them from; give --hostfile FILE"
        raise ConfigError(msg)
    if choice.exclude:
        msg = f"--exclude {choice.exclude} needs a host file, or a SLURM allocation, from which to exclude"
        raise ConfigError(msg)
    if not choice.include:
        return (Host(HERE, tuple(range(choice.num_gpus or ranks or 1))),)
    named = parse_filter(choice.include, "--include")
    strange = [name for name in named if not is_here(name)]
    if strange or len(named) > 1:
        msg = f"--include {choice.include} names {', '.join(strange or named)}; for other hosts give --hostfile FILE"
        raise ConfigError(msg)
    (slots,) = named.values()
    return (Host(HERE, slots or tuple(range(ranks or 1))),)


def fill(hosts: Sequence[Host], ranks: int | None, where: str) -> tuple[Host, ...]:
    """The first slots of the hosts, as many as there are ranks; None takes all.

    Raises:
        ConfigError: there are fewer slots.
    """
    there = sum(len(host.slots) for host in hosts)
    if ranks is None:
        return tuple(hosts)
    if ranks > there:
        msg = f"{ranks} ranks (-n) need as many slots, but the hosts of {where} have {there}; give them more slots="
        raise ConfigError(msg)
    filled = []
    for host in hosts:
        taken = host.slots[:ranks]
        ranks -= len(taken)
        if taken:
            filled.append(Host(host.name, taken))
    return tuple(filled)


def is_here(name: str) -> bool:
    """True for a name of this machine."""
    own = socket.gethostname()
    return name in (HERE, "127.0.0.1", "::1", own, own.partition(".")[0])


def expand_slurm_names(text: str) -> list[str]:
    """Expand SLURM's short form of names: n[01-03,7],login gives n01 n02 n03 n7 login.

    Raises:
        ConfigError: the text is no list of hosts.
    """
    names, place = [], 0
    while place < len(text):
        match = _OF_SLURM.match(text, place)
        if match is None:
            msg = f"SLURM_JOB_NODELIST is {text!r}, not a list of hosts; unset it or start inside a SLURM job"
            raise ConfigError(msg)
        place = match.end()
        if match[2] is None:
            names.append(match[1])
            continue
        for part in match[2].split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1)
            names += [f"{match[1]}{number:0{len(first)}d}" for number in numbers]
    return names


def first_slurm_name(text: str) -> str:
    """The first host of SLURM's short form: of n[01-03,7],login n01; brackets may stand anywhere in a name."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0] if first else "").strip()


def slurm_slots(environ: Mapping[str, str]) -> Slots:
    """The hosts of a SLURM allocation with as many slots as it has tasks there, one where it does not say.

    Raises:
        ConfigError: a variable of SLURM cannot be read.
    """
    names = expand_slurm_names(environ.get("SLURM_JOB_NODELIST", ""))
    text = environ.get("SLURM_TASKS_PER_NODE", "")
    counts = [int(count) for count, times in _TASKS.findall(text) for _ in range(int(times or 1))]
    counts += [1] * (len(names) - len(counts))
    return {name: tuple(range(max(1, count))) for name, count in zip(names, counts, strict=False)}


def in_slurm_order(hosts: Sequence[Host], environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Sort the hosts as the allocation does: MPICH starts its helpers by srun, which uses that order."""
    names = expand_slurm_names(environ.get("SLURM_JOB_NODELIST", ""))
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(hosts, key=lambda host: places.get(host.name, len(places))))


def describe(hosts: Sequence[Host]) -> str:
    """The hosts with their numbers of ranks, in few words."""
    return ", ".join(f"{host.name} ({len(host.slots)})" for host in hosts)


def count_ranks(hosts: Sequence[Host]) -> int:
    """Number of slots."""
    return sum(len(host.slots) for host in hosts)
