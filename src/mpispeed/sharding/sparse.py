"""Sparse gradients of embeddings: the rows that were used are sent, not full tables.

Every rank sends the number of its rows, then their indices and values, padded to the largest number. A dense gradient
(of a table without `sparse=True`, or one that also serves a dense layer) is sent by its nonzero rows. A table with so
many used rows that the full one is smaller is sent in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.base.errors import StoreError
from mpispeed.sharding.reducers import Listener

if TYPE_CHECKING:
    from collections.abc import Set

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.arena import Arena
    from mpispeed.store.layout import Entry, Unit

INDEX = torch.int32
"""How row numbers travel: a table of 2^31 rows would not fit the flat buffer of a unit."""


def find_tables(model: nn.Module) -> set[int]:
    """Ids of the weights of `nn.Embedding` and `nn.EmbeddingBag`, whether or not they were made with `sparse=True`."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}


class RowReducer(Listener):
    """All-reduces full gradients; those of sparse tables row by row."""

    def __init__(self, tables: Set[str]) -> None:
        """Args: `tables` are the names of the parameters whose gradients are sent as rows."""
        self._tables = tables
        self._rows: dict[str, list[torch.Tensor]] = {}

    def note(self, unit: Unit, entry: Entry, grad: torch.Tensor) -> None:
        """Remember which rows of a table the gradient touches."""
        if entry.name in self._tables:
            if grad.layout == torch.sparse_coo:
                rows = grad.coalesce().indices()[0]
            else:
                rows = grad.reshape(entry.shape[0], -1).count_nonzero(1).nonzero().reshape(-1)
            self._rows.setdefault(entry.name, []).append(rows)

    def forget(self) -> None:
        """Forget noted rows."""
        self._rows.clear()

    def __call__(
        self, mesh: Mesh, unit: Unit, wire: torch.Tensor, target: torch.Tensor, scale: float, arena: Arena
    ) -> None:
        """As in `Reducer`, for full targets."""
        if target.numel() != wire.numel():
            msg = (
                f"rows of tables are summed into whole gradients, not into {target.numel()} of {wire.numel()} elements"
            )
            raise StoreError(msg)
        comm, position = mesh[unit.states.partial], 0
        tables = [entry for entry in unit.layout.entries if entry.name in self._tables]
        for entry in tables:
            if entry.offset > position:
                comm.all_reduce(wire[position : entry.offset], scale=scale)
            self._sum_rows(comm, entry, wire[entry.span.slice].view(entry.shape[0], -1), scale)
            position = entry.span.stop
        if position < wire.numel():
            comm.all_reduce(wire[position:], scale=scale)
        if target.data_ptr() != wire.data_ptr():
            target.copy_(wire)

    def _sum_rows(self, comm: Comm, entry: Entry, table: torch.Tensor, scale: float) -> None:
        noted = self._rows.pop(entry.name, [])
        own = torch.cat(noted).unique() if noted else torch.empty(0, dtype=torch.int64)
        counts = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(counts, torch.tensor([own.numel()]))
        most = int(counts.max())
        # An all-reduce sends every element about twice; rows arrive from each rank once.
        if most * comm.size >= 2 * entry.shape[0]:
            comm.all_reduce(table, scale=scale)
            return
        width = table.shape[1]
        indices = torch.zeros(most, dtype=INDEX)
        values = torch.zeros(most, width, dtype=table.dtype)
        indices[: own.numel()] = own.to(INDEX)
        values[: own.numel()] = table[own]
        all_indices, all_values = indices.new_empty(comm.size * most), values.new_empty(comm.size * most, width)
        comm.all_gather(all_indices, indices)
        comm.all_gather(all_values, values)
        flat = all_indices.to(torch.int64)
        used = flat.unique()
        sums = torch.zeros(used.numel(), width, dtype=torch.promote_types(table.dtype, torch.float32))
        for rank, count in enumerate(counts.tolist()):  # in rank order; rows of one rank are all different
            part = slice(rank * most, rank * most + count)
            sums.index_add_(0, torch.searchsorted(used, flat[part]), all_values[part].to(sums.dtype))
        table[used] = (sums * scale).to(table.dtype)
