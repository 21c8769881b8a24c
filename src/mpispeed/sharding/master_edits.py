"""Masters and gradients of this rank, in pieces where states are in swap files, for what is no update rule."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from mpispeed.base.errors import StoreError
from mpispeed.store.layout import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from mpispeed.sharding.grad_shards import GradShards
    from mpispeed.sharding.param_shards import ParamShards
    from mpispeed.store.layout import Unit


def edit_masters(params: ParamShards, edit: Callable[[str, torch.Tensor], None]) -> None:
    """Call `edit(name, values)` for this rank's range of each trained parameter, and keep what it changes in place.

    `values` is flat, in the dtype of masters; ranges of states in swap files come in several pieces. The low-precision
    copies follow, so that publishing brings the changes to the parameters.

    Collective over: the data axis, if states are in swap files; else local.

    Raises:
        StoreError: on every rank, if a swap file of one cannot be read or written.
    """
    with params.mesh["data"].together(StoreError) if params.tiers.is_swapping else nullcontext():
        for unit in params.table.units:
            _edit_unit(params, unit, edit)
        params.tiers.settle()


def _edit_unit(params: ParamShards, unit: Unit, edit: Callable[[str, torch.Tensor], None]) -> None:
    own, stored, low = params.span(unit), params.stored_master(unit), params.low_precision(unit)
    length = max(1, min(own.numel, params.tiers.plan.window_elements) if stored.is_swapped else own.numel)
    for start in range(own.start, own.stop, length):
        chunk = Span(start, min(start + length, own.stop))
        local = chunk.shifted(-own.start)
        leases = [stored.lend(local.start, local.stop)]
        if low is not None:
            leases.append(low[0].lend(low[1] + local.start, low[1] + local.stop, reads=False))
        changed = False
        try:
            values = leases[0].wait()
            for entry in unit.layout.entries:
                common = entry.span.intersect(chunk)
                if common.numel:
                    edit(entry.name, values[common.shifted(-chunk.start).slice])
            for lease in leases[1:]:
                lease.wait().copy_(values)
            changed = True
        finally:
            for lease in leases:
                lease.give_back(changed=changed)


def read_gradients(
    params: ParamShards,
    grads: GradShards,
    units: Iterable[Unit],
    read: Callable[[Unit, Span, torch.Tensor, torch.Tensor], None],
) -> None:
    """Call `read(unit, span, masters, gradients)` for this rank's range of units, in one piece or several.

    `span` counts from the start of the range. Gradients are those of the update, in the memory of the masters, but for
    the step's multiplier. Nothing may be changed.

    Collective over: the data axis, if states are in swap files; else local.

    Raises:
        StoreError: on every rank, if a swap file of one cannot be read.
    """
    with params.mesh["data"].together(StoreError) if params.tiers.is_swapping else nullcontext():
        for unit in units:
            numel, stored, (grad, at) = params.span(unit).numel, params.stored_master(unit), grads.stored(unit)
            is_swapped = stored.is_swapped or grad.is_swapped
            length = max(1, min(numel, params.tiers.plan.window_elements) if is_swapped else numel)
            for start in range(0, numel, length):
                span = Span(start, min(start + length, numel))
                leases = [stored.lend(span.start, span.stop), grad.lend(at + span.start, at + span.stop)]
                try:
                    masters, gradients = (lease.wait() for lease in leases)
                    read(unit, span, masters, gradients.to(masters.device))
                finally:
                    for lease in leases:
                        lease.give_back(changed=False)
