"""Verbs of a process group that combine tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mpispeed.mesh.comm import Comm
from mpispeed.process_group import collectives
from mpispeed.process_group.carrier import Carrier, Tensors, one, root_of
from mpispeed.process_group.reduction import Reduction, reduction_of


class Reductions(Carrier):
    """Sums and other reductions."""

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks in place."""
        x, reduction = one(tensors), reduction_of(opts)
        return self.run(
            "all_reduce", opts, [x], lambda comm: collectives.all_reduce(comm, x, reduction), _label(x, reduction)
        )

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Combine several tensors of all ranks in place."""
        reduction = reduction_of(opts)
        return self.run(
            "all_reduce",
            opts,
            tensors,
            lambda comm: collectives.all_reduce_many(comm, tensors, reduction),
            _label(tensors[0], reduction, len(tensors)),
        )

    def reduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> dist.Work:
        """Combine a tensor of all ranks on one of them."""
        x, root, reduction = one(tensors), root_of(opts), reduction_of(opts)
        return self.run(
            "reduce",
            opts,
            [x],
            lambda comm: collectives.reduce(comm, x, root, reduction),
            f"{_label(x, reduction)} to rank {root}",
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        """Combine lists of tensors and keep this rank's."""
        out, parts, reduction = one(outputs), inputs[0], reduction_of(opts)
        return self.run(
            "reduce_scatter",
            opts,
            [out],
            lambda comm: collectives.reduce_scatter(comm, out, parts, reduction),
            _label(parts[0], reduction, len(parts)),
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Combine a tensor and keep this rank's equal part."""
        reduction = reduction_of(opts)
        return self.run(
            "reduce_scatter",
            opts,
            [output],
            lambda comm: collectives.reduce_scatter_single(comm, output, input, reduction),
            _label(input, reduction),
        )

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Combine several tensors and keep this rank's equal part of each."""
        reduction = reduction_of(opts)

        def body(comm: Comm) -> None:
            for out, x in zip(outputs, inputs, strict=True):
                collectives.reduce_scatter_single(comm, out, x, reduction)

        return self.run("reduce_scatter", opts, outputs, body, _label(inputs[0], reduction, len(inputs)))

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced


def _label(x: torch.Tensor, reduction: Reduction, count: int = 1) -> str:
    what = f"{reduction.op} of {x.numel()} {x.dtype}"
    return what if count == 1 else f"{what} and {count - 1} more tensors"
