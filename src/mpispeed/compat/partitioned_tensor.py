"""`deepspeed.runtime.utils.PartitionedTensor`: a tensor of which each rank of a group keeps an equal part."""

from __future__ import annotations

import math
from typing import Any

import torch

from mpispeed.base.errors import UsageError
from mpispeed.compat import comm
from mpispeed.compat.comm_groups import get_rank, get_world_size
from mpispeed.pipe.cut import partition_uniform


class PartitionedTensor:
    """A part of a flattened tensor, and how the whole is divided; parts differ by at most one element.

    Args:
        tensor: the whole, alike on all ranks; this rank's part is copied.
        group: the ranks that keep a part each; None for all.
        partition_meta: without effect, as in DeepSpeed.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: Any = None) -> None:
        del partition_meta
        self.group = group
        self.num_parts, self.rank = get_world_size(group), get_rank(group)
        self.orig_size, self.orig_device = list(tensor.shape), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        own = slice(self.partition[self.rank], self.partition[self.rank + 1])
        self.local_data = tensor.detach().reshape(-1)[own].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """The tensor that `to_meta()` of this place in a group of this size described.

        Args:
            meta: int64.
            local_part: this rank's part; it is not copied.
            group: the ranks that keep a part each.
            device: where `full()` puts the whole; by default where the part is.

        Raises:
            UsageError: `meta` comes from another place, or from a group of another size.
        """
        dims, *rest = meta.tolist()
        size, (num_parts, rank, *partition) = rest[:dims], rest[dims:]
        made = cls(torch.empty(0), group)
        if (num_parts, rank) != (made.num_parts, made.rank):
            msg = (
                f"PartitionedTensor.from_meta: this is rank {made.rank} of {made.num_parts} of its group, and the "
                f"tensor was divided for rank {rank} of {num_parts}; pass what the same rank of an equal group sent"
            )
            raise UsageError(msg)
        made.orig_size, made.partition, made.local_data = size, partition, local_part.detach()
        made.orig_device = local_part.device if device is None else torch.device(device)
        return made

    def to_meta(self) -> torch.Tensor:
        """Shape and division as int64: with `data()`, what another group needs for `from_meta()`."""
        meta = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(meta, dtype=torch.int64, device=self.orig_device)

    def full(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The whole, in its shape, by default on the device it came from. Collective over: the group."""
        counts = [end - start for start, end in zip(self.partition, self.partition[1:], strict=False)]
        longest = max(counts)  # equal parts can be gathered at once
        padded = self.local_data.new_zeros(longest)
        padded[: self.local_data.numel()] = self.local_data.reshape(-1)
        gathered = self.local_data.new_empty(longest * self.num_parts)
        comm.all_gather_into_tensor(gathered, padded, self.group)
        rows = gathered.view(self.num_parts, longest)
        flat = torch.cat([row[:count] for row, count in zip(rows, counts, strict=True)])
        return flat.view(self.full_size()).to(self.orig_device if device is None else device)

    def data(self) -> torch.Tensor:
        """This rank's part, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Shape of the whole."""
        return self.orig_size

    @property
    def even_split(self) -> bool:
        """True if all parts have as many elements."""
        return math.prod(self.orig_size) % self.num_parts == 0
