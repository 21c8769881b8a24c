"""Parameters and their masters as flat buffers, one of each per unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.store.layout import Entry, Span
from mpispeed.store.move import gather_whole, own_span
from mpispeed.store.placement import Placement

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.table import Table, Unit


class ParamStore:
    """Holds what the model computes with and the high-precision masters that the optimizer updates.

    A parameter's `data` becomes a view of its unit's flat buffer. Where compute and master dtype agree,
    the master is a slice of that buffer and costs no memory of its own.
    """

    def __init__(
        self,
        table: Table,
        mesh: Mesh,
        *,
        compute: torch.dtype | None,
        master: torch.dtype,
        master_placement: Placement,
    ) -> None:
        """Take over the parameters of `table`; all ranks start from the values of the first data rank.

        With `compute` None every unit is computed with in the dtype it came in.

        Collective over: the data axis of `mesh`.
        """
        self.table, self.mesh = table, mesh
        self.compute, self.master_dtype, self.placement = compute, master, master_placement
        self._flat: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []
        for unit in table.units:
            self._adopt(unit)

    def _adopt(self, unit: Unit) -> None:
        source = torch.zeros(unit.layout.padded, dtype=unit.dtype)
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            source[entry.span.slice].copy_(param.detach().reshape(-1))
        self.mesh["data"].broadcast(source)
        compute, master = self.dtypes(unit)
        flat = source if unit.dtype == compute else source.to(compute)
        span = own_span(self.mesh, self.placement, unit.layout.padded)
        # Masters of another dtype start from the model as given, before it is rounded to the compute dtype.
        masters = flat[span.slice] if master == compute else source[span.slice].to(master, copy=True)
        for entry, param in zip(unit.layout.entries, unit.params, strict=True):
            param.data = flat[entry.span.slice].view(entry.shape)
        self._flat.append(flat)
        self._masters.append(masters)

    def dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a unit; fp64 parameters stay fp64 throughout."""
        if unit.dtype == torch.float64:
            return torch.float64, torch.float64
        return unit.dtype if self.compute is None else self.compute, self.master_dtype

    def span(self, unit: Unit) -> Span:
        """The range of the unit's flat buffer whose masters this rank holds."""
        return own_span(self.mesh, self.placement, unit.layout.padded)

    def flat(self, unit: Unit) -> torch.Tensor:
        """The unit's parameters in compute dtype. Shapes: [padded]."""
        return self._flat[unit.index]

    def master(self, unit: Unit) -> torch.Tensor:
        """This rank's masters. Shapes: [span(unit).numel]."""
        return self._masters[unit.index]

    def low_precision(self, unit: Unit) -> torch.Tensor | None:
        """Where rounded masters go: this rank's range of the flat buffer, or None if masters are that range."""
        compute, master = self.dtypes(unit)
        return None if compute == master else self._flat[unit.index][self.span(unit).slice]

    def view(self, unit: Unit, entry: Entry) -> torch.Tensor:
        """A parameter's values in compute dtype, in its own shape."""
        return self._flat[unit.index][entry.span.slice].view(entry.shape)

    def publish(self, unit: Unit) -> None:
        """Bring updated masters to where parameters rest; the rule has filled the low-precision copy already.

        Collective over: the axes by which masters are cut.
        """
        gather_whole(self.mesh, self._flat[unit.index], self.placement)

    def refresh(self) -> None:
        """Make parameters of masters, after masters were loaded or edited.

        Collective over: the axes by which masters are cut.
        """
        for unit in self.table.units:
            low = self.low_precision(unit)
            if low is not None:
                low.copy_(self.master(unit))
            self.publish(unit)

    def refresh_masters(self) -> None:
        """Make masters of parameters, after 16-bit weights were loaded."""
        for unit in self.table.units:
            low = self.low_precision(unit)
            if low is not None:
                self.master(unit).copy_(low)

    @property
    def param_bytes(self) -> int:
        """Bytes of the flat parameter buffers on this rank."""
        return sum(flat.nbytes for flat in self._flat)

    @property
    def master_bytes(self) -> int:
        """Bytes of masters that are not the parameters themselves."""
        return sum(self._masters[u.index].nbytes for u in self.table.units if self.low_precision(u) is not None)


def broadcast_rest(model: nn.Module, table: Table, mesh: Mesh, compute: torch.dtype | None) -> None:
    """Equalise what the store does not manage: frozen parameters and buffers; floats go to `compute` if it is given.

    Collective over: the data axis.
    """
    frozen = [param for param in model.parameters() if table.find(param) is None]
    tensors: list[torch.Tensor] = [*frozen, *model.buffers()]
    for tensor in tensors:
        if compute is not None and tensor.is_floating_point() and tensor.dtype != torch.float64:
            tensor.data = tensor.data.to(compute)
        tensor.data = tensor.data.contiguous()
        mesh["data"].broadcast(tensor.data)
