"""Attributes of a sharded parameter that libraries for DeepSpeed read: its number, size, status and shard."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import torch


class ZeroParamStatus(Enum):
    """Place of the data of a parameter. Source: DeepSpeed's `runtime.zero.partition_parameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ParamFacts:
    """Attributes of a parameter while its data are elsewhere; nothing of it is stored on the parameter."""

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
        """NOT_AVAILABLE: the data are elsewhere."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_persist(self) -> bool:
        """False: it is sharded."""
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

    @property
    def ds_secondary_tensor(self) -> torch.Tensor | None:
        """A copy of this rank's part of the second copy that hpZ keeps, flat, maybe empty.

        None without hpZ, and from an update to the next gather of the parameter.

        Raises:
            UsageError: its engine is gone.
        """
        found: torch.Tensor | None = self._asked("ds_secondary_tensor").second_of(self)
        return found

    def partition_numel(self) -> int:
        """Elements of this rank's shard.

        Raises:
            UsageError: its engine is gone.
        """
        return int(self._asked("partition_numel()").shard_numel(self))


def serve_whole_params(asked: Callable[[nn.Parameter], Any], number: Callable[[nn.Parameter], int]) -> None:
    """Let parameters that have their data answer too, while an engine shards them: gathered ones, and those that stay.

    Libraries ask every parameter of a ZeRO-3 model. The attributes are properties of `torch.nn.Parameter`, since a
    class of its own would slow down whatever torch does with a parameter; for all other parameters they raise
    AttributeError, as if they were not there.

    Args:
        asked: the owner of a parameter that is sharded at rest; None for other parameters.
        number: the parameter's number.
    """

    def serve(name: str, answer: Callable[[Any, nn.Parameter], Any]) -> None:
        def read(param: nn.Parameter) -> Any:
            owner = asked(param)
            if owner is None:
                msg = f"{type(param).__name__!r} object has no attribute {name!r}"
                raise AttributeError(msg)
            return answer(owner, param)

        setattr(nn.Parameter, name, property(read, doc=f"`{name}` of a parameter that ZeRO-3 shards at rest."))

    serve("ds_id", lambda _, param: number(param))
    serve("ds_shape", lambda _, param: param.shape)
    serve("ds_numel", lambda _, param: param.numel())
    serve("ds_status", lambda *_: ZeroParamStatus.AVAILABLE)
    serve("ds_persist", lambda owner, param: owner.shard_numel(param) == param.numel())
    serve("ds_tensor", lambda owner, param: owner.shard_of(param))
    serve("ds_secondary_tensor", lambda owner, param: owner.second_of(param))
    serve("partition_numel", lambda owner, param: lambda: owner.shard_numel(param))
