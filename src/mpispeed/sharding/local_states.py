"""All optimizer states of a parameter on this rank, for whoever reads `optimizer.state`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.optim.rule import KeepsState
from mpispeed.sharding.access import find_place, state_held, windows_of
from mpispeed.sharding.update_windows import state_of

if TYPE_CHECKING:
    import torch
    from torch import nn


def local_states(param: nn.Parameter) -> dict[str, torch.Tensor]:
    """Copies of the states of `param` by name: in its shape if this rank has all of it, else its flat range. Local.

    Of a torch optimizer named in the config, a rank has no state of parameters of which it has no elements.

    Raises:
        UsageError: no engine has the parameter, or states were taken away by `engine.offload_states`.
        StoreError: only on the rank whose swap files cannot be read.
    """
    found = find_place(param)
    state = None if found is None else state_of(found.store)
    if found is None or state is None:
        return {}
    unit, names = found.place.unit, set(state.states.slots)
    if isinstance(state.rule, KeepsState):
        names = names.union(*(state.rule.slots(window.key) for window in windows_of(state, unit)))
    parts = {name: found.own(state_held(found.store, unit, name)).clone() for name in sorted(names)}
    return {name: part.view(param.shape) if part.numel() == param.numel() else part for name, part in parts.items()}
