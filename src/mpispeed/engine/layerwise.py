"""Updates that need norms of whole parameters (such as LAMB's), where ranks hold parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.engine.step import StepContext, Update

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.optim.rule import Layerwise
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import UpdateWindows

_ROWS = 4096  # parameters per message


class LayerwiseUpdate(Update):
    """Update in two passes over the windows, with sums over all parts of each parameter in between.

    The first pass updates the states, the second the masters. States in swap files are read twice.
    """

    def __init__(
        self,
        mesh: Mesh,
        rule: Layerwise,
        update_windows: UpdateWindows,
        groups: list[dict[str, Any]],
        optimizer: torch.optim.Optimizer,
        params: ParamStore,
    ) -> None:
        super().__init__(mesh, rule, update_windows, groups, optimizer)  # type: ignore[arg-type] # it is a rule besides
        self._layerwise, self._params = rule, params
        self._sums = torch.empty(0)
        self._by_axes = _entries_by_axes(params)
        self._sliced = _sliced_entries(params, mesh["model"])

    def works(self, ctx: StepContext) -> Sequence[Callable[[], None]]:
        """The two passes and the sum in between."""
        return (lambda: self._first(ctx), self._sum, lambda: self._second(ctx))

    def _first(self, ctx: StepContext) -> None:
        with closing(self._update_windows.windows(self._groups, ctx.step, has_out=False)) as windows:
            self._sums = self._layerwise.first_half(
                windows, self._update_windows.entries, grad_scale=ctx.multiplier, threads=ctx.threads
            )

    def _sum(self) -> None:
        """Collective over: the axes over which masters are sharded, and the model axis."""
        for axes, entries in self._by_axes:
            self._sums[entries] = _sum_in_order(self._mesh[axes], self._sums[entries])
        if self._sliced.numel():
            self._sums[self._sliced] = _sum_in_order(self._mesh["model"], self._sums[self._sliced])

    def _second(self, ctx: StepContext) -> None:
        with closing(self._update_windows.windows(self._groups, ctx.step)) as windows:
            self._layerwise.second_half(windows, self._sums, grad_scale=ctx.multiplier, threads=ctx.threads)


def _sum_in_order(comm: Comm, own: torch.Tensor) -> torch.Tensor:
    """The sum over ranks in their order, so that replicas of a parameter get the same bits.

    Collective over: comm.
    """
    if comm.size == 1:
        return own
    found = []
    for part in own.split(_ROWS):
        everyone = part.new_empty(comm.size * part.numel())
        comm.all_gather(everyone, part.contiguous().view(-1))
        total = torch.zeros_like(part)
        for one in everyone.view(comm.size, *part.shape):
            total += one
        found.append(total)
    return torch.cat(found) if found else own


def _entries_by_axes(params: ParamStore) -> list[tuple[tuple[str, ...], slice | torch.Tensor]]:
    """Axes over which masters are sharded, each with the indices of the parameters in such units."""
    found: dict[tuple[str, ...], list[int]] = {}
    first = 0
    for unit in params.table.units:
        count = len(unit.layout.entries)
        found.setdefault(unit.states.master.axes, []).extend(range(first, first + count))
        first += count
    if len(found) == 1:
        return [(axes, slice(None)) for axes in found]
    return [(axes, torch.tensor(entries)) for axes, entries in found.items()]


def _sliced_entries(params: ParamStore, slices: Comm) -> torch.Tensor:
    """Indices of the parameters sliced over the model axis, in the same order on all slices.

    Units are formed by element counts, which may differ between slices, and so may the indices; names do not.

    Collective over: the model axis.

    Raises:
        ConfigError: on every slice, if names of parameters differ between slices.
    """
    if slices.size == 1:
        return torch.tensor([], dtype=torch.int64)
    found: dict[str, int] = {}
    first = 0
    for unit in params.table.units:
        if not any(copies.axis == "model" for copies in unit.states.copies):
            found |= {entry.name: first + index for index, entry in enumerate(unit.layout.entries)}
        first += len(unit.layout.entries)
    everyone = slices.gather_objects(sorted(found))
    odd = next((names for names in everyone if names != everyone[0]), None)
    if odd is not None:
        name = min(set(odd).symmetric_difference(everyone[0]))
        msg = (
            f"parameter {name!r} is trained by some ranks of the model axis and not by all of them, and this optimizer "
            "takes norms over all slices of a parameter; give all of them the same parameters"
        )
        raise ConfigError(msg)
    return torch.tensor([found[name] for name in sorted(found)], dtype=torch.int64)
