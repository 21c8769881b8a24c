"""World ranks of groups that other libraries have made."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch


def ranks_of(group: Any) -> list[int] | None:
    """World ranks of a group in its order; None where the object does not tell them.

    Args:
        group: ranks in any iterable, an object with `ranks`, an mpi4py communicator, or a group of torch.distributed.
    """
    found = _by_library(group)
    if found is None:
        found = getattr(group, "ranks", group)
    if isinstance(found, torch.Tensor):
        found = found.tolist()
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        return None
    try:
        return [int(rank) for rank in found]
    except (TypeError, ValueError):
        return None


def _by_library(group: Any) -> list[int] | None:
    if "mpi4py.MPI" in sys.modules:  # imported here, and only by whom has it: the import joins MPI
        from mpi4py import MPI

        if isinstance(group, MPI.Comm):
            own, world = group.Get_group(), MPI.COMM_WORLD.Get_group()
            ranks = list(MPI.Group.Translate_ranks(own, list(range(own.Get_size())), world))
            own.Free()
            world.Free()
            return ranks
    if torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup):
        return list(torch.distributed.get_process_group_ranks(group))
    return None
