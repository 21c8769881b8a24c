"""All optimizer states of a parameter on this rank, for whoever reads `optimizer.state`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.optim.rule import KeepsState
from mpispeed.sharding.access import find_place, state_held, windows_of
from mpispeed.sharding.update_windows import state_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.sharding.update_windows import ZeroState
    from mpispeed.store.table import Unit


def local_states(param: nn.Parameter) -> dict[str, torch.Tensor]:
    """Copies of the states of `param` by name: in its shape if this rank has all of it, else its flat range. Local.

    Raises:
        UsageError: no engine has the parameter, or states were taken away by `engine.offload_states`.
        StoreError: only on the rank whose swap files cannot be read.
    """
    found = find_place(param)
    state = None if found is None else state_of(found.store)
    if found is None or state is None:
        return {}
    unit, names = found.place.unit, _names(state, found.place.unit)
    parts = {name: found.own(state_held(found.store, unit, name)).clone() for name in sorted(names)}
    return {name: part.view(param.shape) if part.numel() == param.numel() else part for name, part in parts.items()}


def _names(state: ZeroState, unit: Unit) -> set[str]:
    """Names of the states of a unit's parameters; where this rank has nothing of the unit, those of another."""
    if not isinstance(state.rule, KeepsState):
        return set(state.states.slots)
    for one in (unit, *state.params.table.units):
        names = set(state.states.slots).union(*(state.rule.slots(w.key) for w in windows_of(state, one)))
        if names:
            return names
    return set()
