"""What a rank holds of parameters and masters, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.store.layout import Span
from mpispeed.store.move import own_span

if TYPE_CHECKING:
    from collections.abc import Collection

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.cell import Cell
    from mpispeed.store.placement import Placement
    from mpispeed.store.table import Unit
    from mpispeed.zero.collect import Collector


class Holdings:
    """What a `ParamStore` holds on this rank, and how many bytes that takes."""

    mesh: Mesh
    compute: torch.dtype | None
    master_dtype: torch.dtype
    placement: Placement  # of masters
    _placements: list[Placement]  # of parameters
    _rest: list[Cell]
    _masters: list[Cell]
    _shared: set[int]  # units whose masters are their parameters
    _collector: Collector
    away: frozenset[str] = frozenset()  # kinds of states that `engine.offload_states` took away

    def is_resident(self, unit: Unit) -> bool:
        """True if the unit's parameters are whole all the time."""
        return self._placements[unit.index].is_whole

    @property
    def is_all_resident(self) -> bool:
        """True if no parameter is ever cut."""
        return all(placement.is_whole for placement in self._placements)

    def require(self, kinds: Collection[str], caller: str) -> None:
        """Check that states of these kinds are here.

        Raises:
            UsageError: `engine.offload_states` took some of them away.
        """
        missing = sorted(self.away.intersection(kinds))
        if missing:
            msg = (
                f"{caller} needs {', '.join(missing)}, which engine.offload_states() took away; call "
                "engine.reload_states() first, on all ranks"
            )
            raise UsageError(msg)

    def rest_cell(self, unit: Unit) -> Cell:
        """Where the parameters are that this rank holds between uses."""
        return self._rest[unit.index]

    def drop_second(self) -> None:
        """Forget second copies; the next gather takes new ones. Equal on all ranks."""
        self._collector.drop_copies()

    def master_cell(self, unit: Unit) -> Cell:
        """Where this rank's masters are."""
        return self._masters[unit.index]

    def master(self, unit: Unit) -> torch.Tensor:
        """This rank's masters: themselves if they are in memory, else a copy. Shapes: [span(unit).numel]."""
        return self._masters[unit.index].get()

    def put_master(self, unit: Unit, values: torch.Tensor) -> None:
        """Set the masters here; nothing is copied if `values` are what `master` returned from memory."""
        self._masters[unit.index].put(values)

    @property
    def param_bytes(self) -> int:
        """Parameters at rest in memory, frozen ones that are in units included."""
        return sum(rest.memory_bytes for rest in self._rest) + self._collector.code_bytes

    @property
    def second_bytes(self) -> int:
        """Second copies."""
        return self._collector.second_bytes

    @property
    def master_bytes(self) -> int:
        """Masters in memory that are not the parameters themselves."""
        return sum(cell.memory_bytes for i, cell in enumerate(self._masters) if i not in self._shared)

    def dtypes(self, unit: Unit) -> tuple[torch.dtype, torch.dtype]:
        """Compute and master dtype of a unit; fp64 parameters and integers keep theirs throughout."""
        if unit.dtype == torch.float64 or not unit.dtype.is_floating_point:
            return unit.dtype, unit.dtype
        return unit.dtype if self.compute is None else self.compute, self.master_dtype

    # -- where things are ----------------------------------------------------------------------------------------

    def rest_span(self, unit: Unit) -> Span:
        """The range of the unit's flat buffer that this rank holds at rest."""
        return own_span(self.mesh, self._placements[unit.index], unit.layout.padded)

    def span(self, unit: Unit) -> Span:
        """The range of the unit's flat buffer whose masters this rank holds; empty for frozen units."""
        if not unit.is_trainable:
            return Span(0, 0)
        return own_span(self.mesh, self.placement, unit.layout.padded)

    def rest(self, unit: Unit) -> torch.Tensor:
        """What this rank holds of the parameters, in compute dtype; a copy where it is coded or swapped.

        Shapes: [rest_span(unit).numel].
        """
        codes = self._collector.codes.get(unit.index)
        return self._rest[unit.index].get() if codes is None else codes.values()

    def put_rest(self, unit: Unit, values: torch.Tensor) -> None:
        """Keep `values` as what rests here; they are not copied if they are what `rest` returned.

        Shapes: values [rest_span(unit).numel].
        """
        codes = self._collector.codes.get(unit.index)
        if codes is not None:
            codes.keep(values)
        else:
            self._rest[unit.index].put(values)
        self._collector.forget(unit)

    def fill(self, unit: Unit, values: torch.Tensor) -> None:
        """Fill the unit's low-precision copy here, where there is one; masters stay. Local.

        Shapes: values as the master.

        Raises:
            StoreError: a swap file cannot be written.
        """
        low = self.low_precision(unit)
        if low is None:
            return
        cell, start = low
        if cell.is_swapped:  # it is cut as the masters are
            cell.put(values.to(cell.dtype))
        else:
            cell.get()[start : start + self.span(unit).numel].copy_(values)

    def low_precision(self, unit: Unit) -> tuple[Cell, int] | None:
        """Where rounded masters go, and where in it their range begins; None if masters are what rests."""
        if not unit.is_trainable or unit.index in self._shared:
            return None
        return self._rest[unit.index], self.span(unit).start - self.rest_span(unit).start
