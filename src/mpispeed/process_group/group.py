"""A process group of torch.distributed whose verbs are those of our groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mpispeed.process_group.combining import Reductions
from mpispeed.process_group.messages import Messages
from mpispeed.process_group.moves import Moves

BACKEND = "mpi4py"
"""Name of the backend, as in `torch.distributed.init_process_group`."""


class MpiProcessGroup(Reductions, Moves, Messages):
    """Verbs of torch.distributed over a group of ranks.

    Calls run one after the other: those with `async_op=False` on the calling thread where nothing is under way, others
    on a thread of this group, where their futures are completed. Every call is compared between ranks before it runs.
    Methods take what torch's own groups take, under both names where torch has renamed a verb.
    """

    def getBackendName(self) -> str:
        """Name of the backend."""
        return BACKEND

    name = _get_backend_name = getBackendName

    def barrier(self, opts: Any = None) -> dist.Work:
        """Meet all ranks, after what was started before."""
        return self.run("barrier", opts, [], lambda comm: comm.started.barrier())
