"""Shards of parameters and masters on this rank, and the kinds of model states that can leave memory."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import torch

from mpispeed.base.errors import UsageError
from mpispeed.sharding import sharded_param
from mpispeed.store.layout import Span
from mpispeed.store.transfers import own_span

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.gather import UnitGatherer
    from mpispeed.store.placement import Placement
    from mpispeed.store.stored_tensor import StoredTensor
    from mpispeed.store.table import Table, Unit


class OffloadStateTypeEnum(str, Enum):
    """States that `engine.offload_states` takes out of memory; the plain strings mean the same.

    Source: names and meaning as in DeepSpeed's documentation of `offload_states`.
    """

    optim_states = "optim_states"
    """State of the optimizer."""
    hp_params = "hp_params"
    """Masters that are not the parameters themselves."""
    lp_params = "lp_params"
    """Parameters that the model computes with; in fp32 training they are the masters too."""
    lp_grads = "lp_grads"
    """Accumulated gradients."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Scratch buffers that nobody uses; they are freed, and made again when they are needed."""

    def __str__(self) -> str:
        return self.value


class ParamShards:
    """Parameters and masters that a `ParamStore` holds on this rank, and their bytes."""

    mesh: Mesh
    table: Table
    compute: torch.dtype | None
    master_dtype: torch.dtype
    placement: Placement  # of masters
    _placements: list[Placement]  # of parameters
    _rest: list[StoredTensor]
    _masters: list[StoredTensor]
    _shared: set[int]  # units whose masters are their parameters
    _gatherer: UnitGatherer
    away: frozenset[str] = frozenset()  # kinds of states that `engine.offload_states` took away

    def is_resident(self, unit: Unit) -> bool:
        """True if the unit's parameters are never sharded."""
        return self._placements[unit.index].is_replicated

    @property
    def is_all_resident(self) -> bool:
        """True if no parameter is ever sharded."""
        return all(placement.is_replicated for placement in self._placements)

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

    def stored_shard(self, unit: Unit) -> StoredTensor:
        """The stored tensor of the parameters that this rank holds between uses."""
        return self._rest[unit.index]

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        """A copy of this rank's shard at rest. Local."""
        self.require((OffloadStateTypeEnum.lp_params,), "param.ds_tensor")
        unit, common = self._shard(param)
        return self.rest(unit)[common.shifted(-self.rest_span(unit).start).slice].clone()

    def shard_numel(self, param: nn.Parameter) -> int:
        """Elements of this rank's shard at rest. Local."""
        return self._shard(param)[1].numel

    def second_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """A copy of this rank's part of the second copy; None while there is none or it is out of date. Local."""
        self.require((OffloadStateTypeEnum.lp_params,), "param.ds_secondary_tensor")
        place = self.table.locate(param)
        found = None if place is None else self._gatherer.copy_of(place.unit)
        if place is None or found is None:
            return None
        values, span = found
        return values[place.entry.span.intersect(span).shifted(-span.start).slice].clone()

    def _shard(self, param: nn.Parameter) -> tuple[Unit, Span]:
        place = self.table.locate(param)
        if place is None:
            sharded_param.refuse(param, "param.ds_tensor")
        return place.unit, place.entry.span.intersect(self.rest_span(place.unit))

    def drop_second(self) -> None:
        """Drop second copies; the next gather takes new ones. Equal on all ranks."""
        self._gatherer.drop_copies()

    def stored_master(self, unit: Unit) -> StoredTensor:
        """The stored tensor of this rank's masters."""
        return self._masters[unit.index]

    def master(self, unit: Unit) -> torch.Tensor:
        """This rank's masters: themselves if they are in memory, else a copy. Shapes: [span(unit).numel]."""
        return self._masters[unit.index].get()

    def put_master(self, unit: Unit, values: torch.Tensor) -> None:
        """Set the masters here; copies nothing if `values` are what `master` returned from memory."""
        self._masters[unit.index].put(values)

    @property
    def param_bytes(self) -> int:
        """Parameters at rest in memory, frozen ones that are in units included."""
        return sum(rest.memory_bytes for rest in self._rest) + self._gatherer.code_bytes

    @property
    def second_bytes(self) -> int:
        """Second copies."""
        return self._gatherer.second_bytes

    @property
    def master_bytes(self) -> int:
        """Masters in memory that are not the parameters themselves."""
        return sum(stored.memory_bytes for i, stored in enumerate(self._masters) if i not in self._shared)

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
        """This rank's shard of the parameters, in compute dtype; a copy where it is quantized or swapped.

        Shapes: [rest_span(unit).numel].
        """
        codes = self._gatherer.codes.get(unit.index)
        return self._rest[unit.index].get() if codes is None else codes.values()

    def put_rest(self, unit: Unit, values: torch.Tensor) -> None:
        """Set this rank's shard; copies nothing if `values` are what `rest` returned.

        Shapes: values [rest_span(unit).numel].
        """
        codes = self._gatherer.codes.get(unit.index)
        if codes is not None:
            codes.keep(values)
        else:
            self._rest[unit.index].put(values)
        self._gatherer.forget(unit)

    def fill(self, unit: Unit, values: torch.Tensor) -> None:
        """Fill the unit's low-precision copy here, where there is one; masters stay. Local.

        Shapes: values as the master.

        Raises:
            StoreError: a swap file cannot be written.
        """
        low = self.low_precision(unit)
        if low is None:
            return
        stored, start = low
        if stored.is_swapped:  # it is cut as the masters are
            stored.put(values.to(stored.dtype))
        else:
            stored.get()[start : start + self.span(unit).numel].copy_(values)

    def low_precision(self, unit: Unit) -> tuple[StoredTensor, int] | None:
        """The destination of rounded masters, and the offset of their range in it; None if they are the parameters."""
        if not unit.is_trainable or unit.index in self._shared:
            return None
        return self._rest[unit.index], self.span(unit).start - self.rest_span(unit).start
