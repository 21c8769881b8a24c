"""Settings of process groups."""

from __future__ import annotations

from dataclasses import dataclass

from mpispeed.base.errors import ConfigError

_REDUCTIONS = ("mpi", "ordered")


@dataclass(frozen=True)
class Options:
    """Settings of a process group and of those made of it, given as `pg_options`.

    Attributes:
        reduction: "mpi" leaves the order of sums to the library; "ordered" gives the same bits with any library.
        device: backend of torch that carries tensors of accelerators, such as "nccl"; "" stages them through MPI. Sums
            where `reduction` is "ordered" never take it.
        device_types: devices whose tensors it carries; all but the CPU where it is empty.

    Raises:
        ConfigError: `reduction` is unknown.
    """

    reduction: str = "mpi"
    device: str = ""
    device_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.reduction not in _REDUCTIONS:
            msg = f"pg_options: reduction={self.reduction!r} is unknown; choose one of {', '.join(_REDUCTIONS)}"
            raise ConfigError(msg)
