"""Groups of ranks that share sequences, as DeepSpeed's scripts take them: before there is an engine, and for torch.

Scripts hand the group to functions of torch.distributed as well as to verbs of this library, so it is a process group
of torch over MPI, where torch has a default group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.compat.comm_groups import current_world, group_of
from mpispeed.engine.ownership import newest_mesh
from mpispeed.mesh.comm import Comm
from mpispeed.nn.sequence.group import SequenceGroup
from mpispeed.process_group.group import BACKEND

_GROUPS: dict[tuple[int, ...], tuple[Any, Any]] = {}
"""Ranks -> the default group of torch at that time, and their group."""

_REGISTERED: list[SequenceMpu] = []
"""What `register_with_transformers` made last."""


class SequenceMpu:
    """Places of ranks for `initialize(mpu=...)`: ranks that share a sequence are neighbours.

    Methods are those that DeepSpeed documents for its own object; ranks "data parallel" have samples of their own,
    "sequence data parallel" are all of those and the ones that share their sequences.
    """

    cuts_batches = False
    """The loader or the script cuts batches; `initialize` does not."""

    def __init__(self, size: int) -> None:
        """Make the groups.

        Collective over: all ranks.

        Raises:
            ConfigError: the size does not divide the ranks.
        """
        world = current_world()
        if size < 1 or world.size % size:
            msg = f"sequence_parallel_size {size} does not divide the {world.size} ranks of the job"
            raise ConfigError(msg)
        first = world.rank - world.rank % size
        self._size = size
        self._ranks = {
            "sequence": list(range(first, first + size)),
            "data": list(range(world.rank % size, world.size, size)),
            "sequence data": list(range(world.size)),
            "model": [world.rank],
        }
        comm = world.comm.split(first, self._ranks["sequence"], ("sequence",))
        self.sequence = SequenceGroup.split(comm, 1)
        self._groups = {kind: torch_group(ranks) for kind, ranks in self._ranks.items()}

    def _rank(self, kind: str) -> int:
        return self._ranks[kind].index(current_world().rank)

    def get_sequence_parallel_group(self) -> Any:
        """Ranks that share this rank's sequences."""
        return self._groups["sequence"]

    def get_sequence_parallel_world_size(self) -> int:
        """How many ranks share a sequence."""
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        """Place among the ranks that share a sequence."""
        return self._rank("sequence")

    def get_data_parallel_group(self) -> Any:
        """Ranks with the same part of other sequences."""
        return self._groups["data"]

    def get_data_parallel_world_size(self) -> int:
        """How many sequences are worked on at a time."""
        return len(self._ranks["data"])

    def get_data_parallel_rank(self) -> int:
        """Which of these sequences this rank has a part of."""
        return self._rank("data")

    def get_sequence_data_parallel_group(self) -> Any:
        """All ranks, over which ZeRO shards."""
        return self._groups["sequence data"]

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many ranks there are."""
        return len(self._ranks["sequence data"])

    def get_sequence_data_parallel_rank(self) -> int:
        """The world rank."""
        return self._rank("sequence data")

    def get_model_parallel_group(self) -> Any:
        """This rank: layers are not sliced."""
        return self._groups["model"]

    def get_model_parallel_world_size(self) -> int:
        """1: layers are not sliced."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0: layers are not sliced."""
        return 0


def torch_group(ranks: Sequence[int]) -> Any:
    """A process group of torch over MPI of some world ranks, made once; a `Comm` where torch has no default group.

    Collective over: `ranks`, in the same order of calls; without a default group over all ranks.
    """
    default = dist.group.WORLD if dist.is_initialized() else None
    key = tuple(ranks)
    found = _GROUPS.get(key)
    if found is None or found[0] is not default:
        if default is None:
            world = current_world()
            made: Any = world.comm.split(min(ranks), list(ranks), ("sequence",))
        elif len(ranks) == dist.get_world_size():
            made = default
        else:
            made = dist.new_group(list(ranks), backend=BACKEND, use_local_synchronization=True)
        found = _GROUPS[key] = default, made
    return found[1]


def register(size: int) -> SequenceMpu:
    """Places of the ranks for sequences over `size` of them, made once for a size. Collective over: all ranks."""
    if not _REGISTERED or _REGISTERED[-1].get_sequence_parallel_world_size() != size:
        _REGISTERED[:] = [SequenceMpu(size)]
    return _REGISTERED[-1]


def forget() -> None:
    """Let go of what was registered. Local."""
    _REGISTERED.clear()


def sequence_group_of(group: Any) -> SequenceGroup:
    """The groups of a sequence axis by one that a script hands on.

    Collective over: `group`, where it is not that of the registered places.
    """
    comm: Comm = group_of(group)
    for mpu in _REGISTERED:
        if tuple(mpu.sequence.comm.ranks) == tuple(comm.ranks):
            return mpu.sequence
    return SequenceGroup.split(comm, 1)


def _get_sequence_parallel_group() -> Any:
    """Ranks that share sequences: of the newest engine, else of the registered places.

    Collective over: those ranks, at the first call.

    Raises:
        UsageError: neither is there.
    """
    mesh = newest_mesh()
    if mesh is not None:
        return torch_group(mesh["sequence"].ranks)
    if _REGISTERED:
        return _REGISTERED[-1].get_sequence_parallel_group()
    msg = (
        "no ranks share sequences yet; call mpispeed.initialize with sequence_parallel_size in the config, or "
        "UlyssesSPAttentionHF.register_with_transformers"
    )
    raise UsageError(msg)
