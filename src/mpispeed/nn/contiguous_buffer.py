"""A buffer for the kept activations of all checkpointed calls, so that long-lived tensors leave no gaps in memory."""

from __future__ import annotations

import weakref

import torch

from mpispeed.base.errors import UsageError


class Slots:
    """A fixed number of equal slots. They are taken when a call is checkpointed, and free when its graph is gone.

    The buffer is made when the first slot is taken, and again with larger slots when all are free and one is too short.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: _Pool | None = None

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return 0 if self._pool is None else self.count - len(self._pool.free)

    def take(self, owner: object, nbytes: int, device: torch.device) -> torch.Tensor:
        """A slot for as long as `owner` lives. Shapes: [nbytes], uint8.

        Raises:
            UsageError: all slots are taken, or they are too short.
        """
        pool = self._pool
        if pool is None or (not self.used and not pool.fits(nbytes, device)):
            pool = self._pool = _Pool(self.count, nbytes, device)
        if not pool.free:
            msg = (
                f"number_checkpoints is {self.count}, and this is checkpointed call {self.count + 1} whose backward "
                "has not run; set it to the calls of one forward pass (in a pipeline: of all micro-batches that are "
                "under way), or call checkpointing.reset() after forward passes without backward"
            )
            raise UsageError(msg)
        if not pool.fits(nbytes, device):
            msg = (
                f"contiguous_memory_optimization has slots of {pool.nbytes} bytes on {pool.device} for the activations "
                f"of a call, and this one needs {nbytes} on {device}; it is for calls with equal shapes: switch it off"
            )
            raise UsageError(msg)
        index = pool.free.pop()
        weakref.finalize(owner, pool.free.append, index).atexit = False
        return pool.memory[index, :nbytes]

    def clear(self) -> None:
        """Drop the buffer. Calls that are under way keep their part of it alive."""
        self._pool = None


class _Pool:
    """A buffer and its slots."""

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = nbytes, device
        self.memory = torch.empty(count, nbytes, dtype=torch.uint8, device=device)
        self.memory.zero_()  # touched now, so that memory that is not there shows at once
        self.free = list(reversed(range(count)))

    def fits(self, nbytes: int, device: torch.device) -> bool:
        """True if a slot is large enough."""
        return nbytes <= self.nbytes and device == self.device
