"""Attributes of a sharded parameter that libraries for DeepSpeed read: its number, size, status and shard."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class ZeroParamStatus(Enum):
    """Place of the data of a parameter. Source: DeepSpeed's `runtime.zero.partition_parameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ParamFacts:
    """Attributes of a parameter while its data are elsewhere; nothing of it is stored on the parameter.

    A parameter that has its data, between gathers too, is an ordinary one without these attributes: what stays whole at
    stage 3, and everything at stages 0 to 2.
    """

    if TYPE_CHECKING:
        shape: torch.Size

        def numel(self) -> int:
            """Elements of the full parameter."""
            ...

        def _asked(self, reader: str) -> Any: ...

        def _number(self) -> int: ...

    @property
    def ds_id(self) -> int:
        """A number of its own, the same on all ranks."""
        return self._number()

    @property
    def ds_shape(self) -> torch.Size:
        """The full shape, which is `shape` too."""
        return self.shape

    @property
    def ds_numel(self) -> int:
        """Elements of the full parameter, which is what `numel()` says too."""
        return self.numel()

    @property
    def ds_status(self) -> ZeroParamStatus:
        """NOT_AVAILABLE: a parameter with its data has no such attribute."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """False: a parameter that is never sharded has no such attribute."""
        return False

    @property
    def ds_tensor(self) -> torch.Tensor:
        """A copy of this rank's shard: a range of the flattened parameter, without padding, maybe empty.

        Raises:
            UsageError: its engine is gone.
            StoreError: only on the rank whose swap files cannot be read.
        """
        found: torch.Tensor = self._asked("ds_tensor").shard_of(self)
        return found

    def partition_numel(self) -> int:
        """Elements of this rank's shard.

        Raises:
            UsageError: its engine is gone.
        """
        return int(self._asked("partition_numel()").shard_numel(self))
