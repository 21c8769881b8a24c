"""Momenta of units for 1-bit optimizers: full on every rank, and 0 where one bit must not say otherwise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError, StoreError
from mpispeed.optim.rule import MASK
from mpispeed.store.placement import REPLICATED
from mpispeed.store.tiers import MASTER
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.sharding.update_windows import StateStore
    from mpispeed.store.layout import Entry, Unit


class Momenta:
    """The slot `exp_avg`: itself where masters are replicated, else with a full copy beside the sharded slot.

    Attributes:
        masks: True where a group's mask says 0, by unit; None where no group of it has one.
    """

    def __init__(self, mesh: Mesh, params: ParamShards, states: StateStore, groups: Sequence[dict[str, Any]]) -> None:
        """Raises ConfigError where a mask does not fit its group."""
        self._mesh, self._params, self._states = mesh, params, states
        found = {unit.index: _mask(unit, groups) for unit in params.table.units}
        self.masks = {i: None if mask is None else mask.to(params.tiers.home(MASTER, i)) for i, mask in found.items()}
        self._whole: dict[int, torch.Tensor] = {}
        self._silent: dict[int, torch.Tensor | None] = {}
        self._edits = states.edits

    def forget(self) -> None:
        """Drop copies, because states are replaced."""
        self._whole.clear()
        self._silent.clear()
        self._edits = self._states.edits

    def look(self) -> None:
        """Drop copies if states were set from outside."""
        if self._edits != self._states.edits:
            self.forget()

    @property
    def is_ready(self) -> bool:
        """True once the data needed from other ranks are here."""
        return len(self._silent) == len(self._params.table.units) and self._edits == self._states.edits

    def of(self, unit: Unit) -> torch.Tensor:
        """The full momentum of a unit; a copy if it is in a swap file. Shapes: [padded].

        Collective over: the data axis, the first time and after states were set, where masters are sharded; always, if
        states are in swap files.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read.
        """
        own = self._read(unit, "exp_avg")
        if unit.states.master.is_replicated:
            return own
        if unit.index not in self._whole:
            whole = torch.zeros(unit.layout.padded, device=own.device)
            all_gather_into(self._mesh, whole, own, unit.states.master, REPLICATED, unit.layout.padded)
            self._whole[unit.index] = whole
        whole = self._whole[unit.index]
        whole[self._params.span(unit).slice].copy_(own)  # groups in full precision change theirs in the update
        return whole

    def keep(self, unit: Unit, momentum: torch.Tensor) -> None:
        """Store a momentum returned by `of` where the update looks for it.

        Collective over: the data axis, if states are in swap files; else local.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be written.
        """
        own = momentum if unit.states.master.is_replicated else momentum[self._params.span(unit).slice]
        with self.together():
            self._states.tensors(unit)["exp_avg"].put(own)

    def together(self) -> AbstractContextManager[None]:
        """Context of what a rank does with its states by itself: a swap file that fails is told to all.

        Collective over: the data axis, if states are in swap files; else local.
        """
        return self._mesh["data"].together(StoreError) if self._params.tiers.is_swapping else nullcontext()

    def _read(self, unit: Unit, slot: str) -> torch.Tensor:
        with self.together():
            return self._states.tensors(unit)[slot].get()

    def silence(self, unit: Unit) -> torch.Tensor | None:
        """Mask of elements whose momentum has to be 0: by a group's mask or a zero frozen variance; None: none.

        Collective over: the data axis, the first time, where masters are sharded.
        Shapes: [padded].
        """
        if unit.index not in self._silent:
            dead = (self._read(unit, "exp_avg_sq") == 0.0).to(torch.uint8)
            if not unit.states.master.is_replicated:
                whole = torch.zeros(unit.layout.padded, dtype=torch.uint8, device=dead.device)
                all_gather_into(self._mesh, whole, dead, unit.states.master, REPLICATED, unit.layout.padded)
                dead = whole
            silent, mask = dead.bool(), self.masks[unit.index]
            for hole in unit.layout.holes():
                silent[hole.slice] = False
            if mask is not None:
                silent |= mask
            self._silent[unit.index] = silent if bool(silent.any()) else None
        return self._silent[unit.index]

    @property
    def nbytes(self) -> int:
        """Bytes on this rank beside the slot."""
        silent = [x for x in self._silent.values() if x is not None]
        return sum(x.nbytes for x in (*self._whole.values(), *silent))


def _mask(unit: Unit, groups: Sequence[dict[str, Any]]) -> torch.Tensor | None:
    """True where a group's mask says 0; None if no group of the unit has one. Shapes: [padded].

    Raises:
        ConfigError: a mask is of another shape than a parameter of its group.
    """
    entries = [entry for entry in unit.layout.entries if groups[entry.group].get(MASK) is not None]
    if not entries:
        return None
    found = torch.zeros(unit.layout.padded, dtype=torch.bool)
    for entry in entries:
        found[entry.span.slice] = _fitting(entry, groups[entry.group][MASK]) == 0
    return found


def _fitting(entry: Entry, mask: Any) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) not in (entry.shape, (entry.numel,)):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        msg = (
            f"{MASK} of parameter group {entry.group} is {shape} and parameter {entry.name!r} in it has shape "
            f"{entry.shape}; give a tensor of zeros and ones of the parameter's shape, and each such parameter a group"
        )
        raise ConfigError(msg)
    return mask.detach().reshape(-1).cpu()
