"""Compression of a buffer over the data axis: by all ranks alike, or between nodes after a mean inside of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.base.device import HOST
from mpispeed.mesh.compressed.onebit import OneBitErrors, exchange, sent_bytes
from mpispeed.mesh.compressed.onebit_nodes import exchange_through, mean_inside, shard_length, zero_errors
from mpispeed.native.one_bit import compensate
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpispeed.mesh.mesh import Mesh


class Compressor:
    """Takes the mean of buffers over the data axis through one bit per element.

    Attributes:
        worker: index of the worker that this rank's values belong to; ranks of a node whose mean is compressed are one
            worker.
        workers: number of workers.
    """

    def __init__(self, mesh: Mesh, hops: tuple[str, str] | None) -> None:
        """Args: `hops` are the axes inside of nodes and between them, or None."""
        self.comm = mesh["data"]
        self._inner = None if hops is None else mesh[hops[0]]
        self._outer = self.comm if hops is None else mesh[hops[1]]
        self.worker, self.workers = self._outer.rank, self._outer.size

    def zeros(self, padded: int, device: torch.device = HOST) -> OneBitErrors:
        """Initial errors of this rank for a buffer on `device`."""
        if self._inner is None:
            return OneBitErrors.zeros(padded, self.workers, device)
        return zero_errors(padded, self._inner.size, self.workers, device)

    def spans(self, errors: OneBitErrors) -> tuple[Span, Span]:
        """Ranges of the padded buffer that the errors of worker and server belong to."""
        inner = 0 if self._inner is None else self._inner.rank
        own = Span(inner * errors.worker.numel(), (inner + 1) * errors.worker.numel())
        start, size = own.start + self.worker * errors.server.numel(), errors.server.numel()
        return own, Span(start, start + size)

    def values(self, errors: OneBitErrors, padded: int) -> torch.Tensor:
        """The tensor to which this rank adds its values: the worker's error, or zeros where a node's mean comes first.

        Shapes: [padded], in fp32.
        """
        if self._inner is None:
            return errors.worker[:padded]
        if errors.worker.device != HOST:
            return torch.zeros(padded, device=errors.worker.device)
        return self.comm.group.scratch("values to code", padded, torch.float32).zero_()

    def mean(self, out: torch.Tensor, errors: OneBitErrors, values: torch.Tensor, squares: Sequence[float]) -> None:
        """Write the approximate mean over ranks of `values` into `out`, bitwise equal on all; of one rank, exact.

        Collective over: the data axis.
        Shapes: out and values [padded]; `values` as from `values`, `squares` of them as from `compensate`.
        """
        if self.comm.size == 1:  # there is nobody to tell
            torch.add(values, errors.server[: out.numel()], out=out)  # what more ranks have left there, if any
            errors.clear()
            return
        if self._inner is None:
            exchange(self.comm, out, errors, squares)
            return
        shard = mean_inside(self._inner, self._outer, values)
        squares = compensate(errors.worker, shard, threads=self.comm.group.threads)
        exchange_through(self._inner, self._outer, out, errors, squares)

    def collect(self, errors: OneBitErrors) -> None:
        """Gather errors of the worker that each rank has only for its server range.

        Collective over: the data axis.
        """
        worker, server = self.spans(errors)
        self._outer.all_gather(errors.worker, errors.worker[server.shifted(-worker.start).slice].clone())

    def sent_bytes(self, padded: int) -> int:
        """Bytes that this rank sends for a buffer; between nodes only, where these are told apart."""
        if self._inner is None:
            return sent_bytes(padded, self.workers)
        return sent_bytes(shard_length(padded, self._inner.size, self.workers), self.workers)

    def plain_bytes(self, padded: int) -> int:
        """Bytes that this rank would send for a sum in fp32."""
        share = 1 if self._inner is None else self._inner.size
        return 2 * 4 * (padded // share) * (self.workers - 1) // self.workers
