"""Options of a start, beyond the program and the number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpispeed.base.errors import ConfigError
from mpispeed.launch.hosts import Host

_BINDING = re.compile(r"cores(?::(\d+))?|none|mpi")


@dataclass(frozen=True, slots=True)
class Binding:
    """Binding of ranks to cores.

    `kind` is "mpi" (as the MPI does by itself), "none" or "cores"; `share` is the number of cores of a rank with
    "cores", None for an equal share; `cores` are the only ones to use, split into equal parts in this order.
    """

    kind: str = "mpi"
    share: int | None = None
    cores: tuple[int, ...] = ()

    def parts(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The listed cores of each rank of a node.

        Raises:
            ConfigError: there are more ranks than listed cores.
        """
        share = len(self.cores) // ranks
        if share < 1:
            msg = f"{ranks} ranks of a node cannot share the {len(self.cores)} cores of --bind_core_list; list more"
            raise ConfigError(msg)
        return tuple(self.cores[rank * share : (rank + 1) * share] for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Wishes:
    """Launcher, hosts, binding and variables of a start; the fields are the options of `mpispeed run`.

    `hosts` is empty for this machine, or for the whole allocation inside a SLURM job. `agent` is the command that
    starts programs on another host in place of ssh. `extra` goes to the launcher as it is. `variables` are set for all
    ranks. `has_runner` is False if the program is not started by `mpispeed.launch.rank`. With `has_torch_env` the
    program sets the variables of torch.distributed, and needs to know the hosts for them.
    """

    hosts: tuple[Host, ...] = ()
    launcher: str = "auto"
    agent: tuple[str, ...] = ()
    binding: Binding = Binding()
    extra: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    has_runner: bool = True
    has_torch_env: bool = False


def parse_binding(text: str, core_list: str | None = None) -> Binding:
    """The binding of `--bind TEXT` and `--bind_core_list CORES`.

    Raises:
        ConfigError: the text is none of mpi, none, cores and cores:N, or the list is wrong.
    """
    match = _BINDING.fullmatch(text)
    share = int(match[1]) if match and match[1] else None
    if match is None or share == 0:
        msg = f"--bind is {text!r}; choose cores, cores:N with N of at least 1, none, or mpi"
        raise ConfigError(msg)
    cores = parse_core_list(core_list) if core_list is not None else ()
    return Binding(text.partition(":")[0], share, cores)


def parse_core_list(text: str) -> tuple[int, ...]:
    """The cores of a list such as 0,2-4,6: ascending, each once.

    Raises:
        ConfigError: the text is no such list.
    """
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None:
            msg = f"--bind_core_list {text!r}: {part!r} is neither a core nor a range; write for example 0,2-4,6"
            raise ConfigError(msg)
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or (cores and first <= cores[-1]):
            msg = f"--bind_core_list {text!r}: {part!r} does not ascend; name each core once, the lowest first"
            raise ConfigError(msg)
        cores += range(first, last + 1)
    return tuple(cores)
