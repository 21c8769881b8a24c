"""Verbs of a process group that only move tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpispeed.mesh.comm import Comm
from mpispeed.process_group import collectives
from mpispeed.process_group.carrier import Carrier, Tensors, one, root_of


class Moves(Carrier):
    """Copies from one rank to all, from all to one, and from each to each."""

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> dist.Work:
        """Copy a tensor of one rank to all."""
        x, root = one(tensors), root_of(opts)
        return self.run(
            "broadcast",
            opts,
            [x],
            lambda comm: collectives.broadcast(comm, x, root),
            f"of {x.nbytes} bytes from rank {root}",
        )

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Collect a tensor of all ranks in a list."""
        places, x = outputs[0], one(inputs)
        return self.run(
            "all_gather", opts, places, lambda comm: collectives.all_gather(comm, places, x), _moved(places)
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Collect a tensor of all ranks in one tensor."""
        return self.run(
            "all_gather",
            opts,
            [output],
            lambda comm: collectives.all_gather_single(comm, output, input),
            _moved([output]),
        )

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Collect several tensors of all ranks, each in one tensor."""

        def body(comm: Comm) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                collectives.all_gather_single(comm, out, x)

        return self.run("all_gather", opts, outputs, body, _moved(outputs))

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Collect several tensors of all ranks in a list of lists, one of each rank."""

        def body(comm: Comm) -> None:
            for number, x in enumerate(inputs):
                collectives.all_gather(comm, [places[number] for places in outputs], x)

        flat = [place for places in outputs for place in places]
        return self.run("all_gather", opts, flat, body, _moved(flat))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Collect a tensor of all ranks in a list of one rank; `outputs` of others is empty."""
        places, x, root = outputs[0] if outputs else [], one(inputs), root_of(opts)
        return self.run(
            "gather",
            opts,
            places,
            lambda comm: collectives.gather(comm, places, x, root),
            f"of {x.nbytes} bytes to rank {root}",
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Give each rank its tensor of a list of one rank; `inputs` of others is empty."""
        out, parts, root = one(outputs), inputs[0] if inputs else [], root_of(opts)
        return self.run(
            "scatter",
            opts,
            [out],
            lambda comm: collectives.scatter(comm, out, parts, root),
            f"of {out.nbytes} bytes from rank {root}",
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Send the j-th tensor to rank j."""
        return self.run("all_to_all", opts, outputs, lambda comm: collectives.all_to_all(comm, outputs, inputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Exchange parts along the first dim."""
        splits = list(output_splits), list(input_splits)
        return self.run(
            "all_to_all", opts, [output], lambda comm: collectives.all_to_all_single(comm, output, input, *splits)
        )

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _moved(tensors: Tensors) -> str:
    return f"of {sum(x.nbytes for x in tensors)} bytes"
