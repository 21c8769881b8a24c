"""Masters, gradients and optimizer state by parameter, read and written under any placement.

Full values are gathered on every rank; local ones are this rank's range of the flattened parameter, possibly empty.
Getters return copies. For frozen parameters they return None and setters do nothing.

Where a disk fails, getters of full values raise a StoreError on every rank. Setters and local getters raise it on
that rank only, because ranks may call them separately: it has to end the job. Sums of gradients that fail first raise
it on every rank.

Source: the functions `safe_get_*` and `safe_set_*` of DeepSpeed's `deepspeed.utils`, documentation 0.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mpispeed.base.errors import StoreError, UsageError
from mpispeed.base.registry import did_you_mean
from mpispeed.optim.rule import KeepsState, Window
from mpispeed.sharding import sharded_param
from mpispeed.sharding.param_shards import OffloadStateTypeEnum
from mpispeed.sharding.params import ParamStore
from mpispeed.sharding.update_windows import UpdateWindows, ZeroState, state_of
from mpispeed.store.layout import Span
from mpispeed.store.placement import REPLICATED
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from mpispeed.sharding.grads import GradStore
    from mpispeed.store.layout import Place, Unit


class UnknownState(UsageError, ValueError):
    """The optimizer has no state of that name, or none yet."""


class NoGradient(UsageError, ValueError):
    """Gradients were asked for outside of the time between backward and step."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The unit and entry of a trained parameter, with the stores that hold it."""

    store: ParamStore
    place: Place

    @property
    def common(self) -> Span:
        """The range of the unit's buffer that belongs to the parameter and whose masters are here."""
        return self.place.entry.span.intersect(self.store.shards.span(self.place.unit))

    def own(self, held: torch.Tensor) -> torch.Tensor:
        """The parameter's part of a tensor over the range of the masters."""
        return held[self.common.shifted(-self.store.shards.span(self.place.unit).start).slice]

    def own_of(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a flat whole value that belongs here."""
        return value[self.common.shifted(-self.place.entry.offset).slice]


Held = Callable[[ParamStore, "Unit"], torch.Tensor]
"""This rank's range of some state of a unit."""


# -- master weights ----------------------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The full master of `param`, in its shape; fp32, or fp64 for fp64 parameters.

    Collective over: the axes over which masters are sharded.

    Raises:
        UsageError: no engine has the parameter.
    """
    return get_full_fp32_params([param])[0]


def get_full_fp32_params(params: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """As `safe_get_full_fp32_param` for several parameters, with one gather per unit.

    Collective over: the axes over which masters are sharded.

    Raises:
        UsageError: no engine has one of the parameters.
    """
    return _collect([find_place(param) for param in params], lambda store, unit: store.shards.master(unit))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor, *, refresh: bool = False) -> None:
    """Make `value`, which is the same on all ranks, the master of `param`.

    What the model computes with follows at the next step, or at once with `refresh`. Where masters are the
    parameters themselves, as in fp32 training, it follows at once in any case.

    Collective over: the axes over which parameters are sharded at rest, without communication.

    Raises:
        UsageError: no engine has the parameter, or `value` is no tensor of as many elements.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = find_place(param)
    if found is None:
        return
    store, unit, entry = found.store, found.place.unit, found.place.entry
    flat = _flat(found, value, entry.numel).to(unit.states.full)
    master = store.shards.master(unit)
    found.own(master).copy_(found.own_of(flat))
    store.shards.put_master(unit, master)
    if not refresh and store.shards.low_precision(unit) is not None:
        return
    rest, held = store.shards.rest(unit), store.shards.rest_span(unit)
    common = entry.span.intersect(held)
    rest[common.shifted(-held.start).slice].copy_(flat[common.shifted(-entry.offset).slice])
    store.shards.put_rest(unit, rest)
    whole = None if store.prefetcher is None or unit.states.param.is_replicated else store.prefetcher.settled(unit)
    if whole is not None:
        whole[entry.span.slice].copy_(flat)


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's range of the flattened master of `param`.

    Raises:
        UsageError: no engine has the parameter, or parameters are not sharded.
        StoreError: only on the rank whose swap files cannot be read.
    """
    found = _find_cut(param, "safe_get_local_fp32_param")
    return None if found is None else found.own(found.store.shards.master(found.place.unit)).clone()


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value` this rank's range of the flattened master of `param`.

    What the model computes with follows at the next step; where masters are the parameters themselves at once.

    Collective over: the axes over which masters are sharded, where masters are parameters that are replicated at rest;
    all ranks have to call it in any case.

    Raises:
        UsageError: no engine has the parameter, parameters are not sharded, or `value` does not fit this rank's range.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = _find_cut(param, "safe_set_local_fp32_param")
    if found is None:
        return
    store, unit = found.store, found.place.unit
    master = store.shards.master(unit)
    found.own(master).copy_(_flat(found, value, found.common.numel))
    store.shards.put_master(unit, master)
    if store.shards.low_precision(unit) is None:
        if store.prefetcher is not None:
            store.prefetcher.reshard([unit])
        store.shards.publish(unit)


# -- gradients ---------------------------------------------------------------------------------------------------


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The full averaged gradient of `param` since the last step, in its shape and in the accumulation dtype.

    It is what the step will use before it unscales and clips: in fp16 it contains the loss scale. Sums over ranks
    that are not due before the step are made now. Where the optimizer leaves gradients local,
    it is this rank's own; with overlap_comm what was agreed on stands there instead, which may be a momentum.

    Collective over: the data axis.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has the parameter.
    """
    return get_full_grads([param])[0]


def get_full_grads(params: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """As `safe_get_full_grad` for several parameters, with one gather per unit.

    Collective over: the data axis.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has one of the parameters.
    """
    found = [find_place(param) for param in params]
    for store in _stores(found):
        _finished(store)
    return _collect(found, lambda store, unit: _grads(store).shards.reduced(unit), are_grads=True)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value`, which is the same on all ranks, the averaged gradient of `param`; in fp16 with the loss scale.

    Where gradients are local, as `safe_get_full_grad` says, it is this rank's own and may differ. It cannot be set once
    it is compressed, as beside the backward pass with overlap_comm.

    Collective over: the data axis.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has the parameter, `value` is no tensor of as many elements, or the gradient is
            compressed.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = find_place(param)
    if found is not None:
        _refuse_coded(found)
        flat, entry, grads = _flat(found, value, found.place.entry.numel), found.place.entry, _finished(found.store)
        span = entry.span.intersect(grads.shards.target_span(found.place.unit))
        _put_grad(found, span, flat[span.shifted(-entry.offset).slice])


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's range of the flattened averaged gradient of `param`; in fp16 with the loss scale.

    Collective over: the data axis, where sums over ranks are outstanding.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has the parameter, or parameters are not sharded.
        StoreError: only on the rank whose swap files cannot be read.
    """
    found = _find_cut(param, "safe_get_local_grad")
    if found is None:
        return None
    grads, unit = _finished(found.store), found.place.unit
    return grads.shards.reduced(unit)[found.common.shifted(-grads.shards.target_span(unit).start).slice].clone()


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make `value` this rank's range of the flattened averaged gradient of `param`; in fp16 with the loss scale.

    Collective over: the data axis, where sums over ranks are outstanding.

    Raises:
        NoGradient: (a ValueError) it is not between backward and step.
        UsageError: no engine has the parameter, parameters are not sharded, or `value` does not fit this rank's range.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = _find_cut(param, "safe_set_local_grad")
    if found is not None:
        _refuse_coded(found)
        _put_grad(found, found.common, _flat(found, value, found.common.numel))


def _put_grad(found: _Found, span: Span, own: torch.Tensor) -> None:
    """Set a range of the unit's buffer."""
    grads, unit = _finished(found.store), found.place.unit
    values = grads.shards.reduced(unit)
    values[span.shifted(-grads.shards.target_span(unit).start).slice].copy_(own)
    grads.shards.put_reduced(unit, values)


def _finished(store: ParamStore) -> GradStore:
    """The gradients, all summed over ranks."""
    grads = _grads(store)
    if not grads.has_gradients:
        msg = "there are no gradients: they can be read and written after engine.backward() and before engine.step()"
        raise NoGradient(msg)
    grads.finish(is_final=False)
    return grads


def _refuse_coded(found: _Found) -> None:
    grads = _finished(found.store)
    if grads.exchange.has_taken(found.place.unit):
        msg = (
            f"the gradient of {found.place.entry.name!r} is coded and agreed on already, beside the backward pass; to "
            "set gradients, set zero_optimization.overlap_comm to false"
        )
        raise UsageError(msg)


def _grads(store: ParamStore) -> GradStore:
    state = state_of(store)
    if state is None:
        msg = "this engine has no optimizer, so there are no gradients"
        raise NoGradient(msg)
    return state.grads


# -- optimizer state ---------------------------------------------------------------------------------------------


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """The full optimizer state `optim_state_key` ("exp_avg", ...) of `param`, in its shape.

    Collective over: the axes over which masters are sharded.

    Raises:
        UnknownState: (a ValueError) the optimizer has no such state, or none before its first step.
        UsageError: no engine has the parameter.
    """
    return get_full_optimizer_states([param], optim_state_key)[0]


def get_full_optimizer_states(params: Iterable[nn.Parameter], optim_state_key: str) -> list[torch.Tensor | None]:
    """As `safe_get_full_optimizer_state` for several parameters, with one gather per unit.

    Collective over: the axes over which masters are sharded.

    Raises:
        UnknownState: (a ValueError) the optimizer has no such state, or none before its first step.
        UsageError: no engine has one of the parameters.
    """
    found = [find_place(param) for param in params]
    for item in found:
        if item is not None:
            _check_key(item, optim_state_key)
    return _collect(found, lambda store, unit: state_held(store, unit, optim_state_key))


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Make `value`, which is the same on all ranks, the optimizer state `optim_state_key` of `param`.

    Collective over: the data axis, for optimizers that keep their state themselves.

    Raises:
        UnknownState: (a ValueError) the optimizer has no such state, or none before its first step.
        UsageError: no engine has the parameter, or `value` is no tensor of as many elements.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = find_place(param)
    if found is not None:
        flat = _flat(found, value, found.place.entry.numel)
        _put_state(found, found.own_of(flat), optim_state_key)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's range of the flattened optimizer state of `param`.

    Collective over: the data axis, for optimizers that keep their state themselves.

    Raises:
        UnknownState: (a ValueError) the optimizer has no such state, or none before its first step.
        UsageError: no engine has the parameter, or parameters are not sharded.
        StoreError: only on the rank whose swap files cannot be read.
    """
    found = _find_cut(param, "safe_get_local_optimizer_state")
    if found is None:
        return None
    _check_key(found, optim_state_key)
    return found.own(state_held(found.store, found.place.unit, optim_state_key)).clone()


def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Make `value` this rank's range of the flattened optimizer state of `param`.

    Collective over: the data axis, for optimizers that keep their state themselves.

    Raises:
        UnknownState: (a ValueError) the optimizer has no such state, or none before its first step.
        UsageError: no engine has the parameter, parameters are not sharded, or `value` does not fit this rank's range.
        StoreError: only on the rank whose swap files cannot be read or written.
    """
    found = _find_cut(param, "safe_set_local_optimizer_state")
    if found is not None:
        _put_state(found, _flat(found, value, found.common.numel), optim_state_key)


def _check_key(found: _Found, key: str) -> None:
    """Raise on every rank if the state is missing, although some ranks hold nothing of the parameter."""
    state, unit = state_of(found.store), found.place.unit
    known: set[str] = set(state.states.slots) if state is not None else set()
    if state is not None and isinstance(state.rule, KeepsState):
        own = {slot for window in windows_of(state, unit) for slot in state.rule.slots(window.key)}
        known = known.union(*found.store.mesh["data"].gather_objects(own))
    if key not in known:
        name = state.rule.name if state is not None else "none"
        has = ", ".join(sorted(known)) or "nothing yet: states appear with its first step"
        msg = f"the optimizer {name} has no state {key!r}; it has {has}.{did_you_mean(str(key), known)}"
        raise UnknownState(msg)


def windows_of(state: ZeroState, unit: Unit) -> list[Window]:
    """The windows of a unit on this rank."""
    update_windows = UpdateWindows(state.params.shards, state.grads.shards, state.states, state.rule)
    return list(update_windows.windows_of((unit,), state.groups, 0))


def state_held(store: ParamStore, unit: Unit, key: str) -> torch.Tensor:
    """One optimizer state over the range of the unit's masters on this rank."""
    state = state_of(store)
    if state is not None and key in state.states.slots:
        return state.states.of(unit)[key]
    master, start = store.shards.master(unit), store.shards.span(unit).start
    held = torch.zeros_like(master)
    if state is not None and isinstance(state.rule, KeepsState):
        for window in windows_of(state, unit):
            slots = state.rule.slots(window.key)
            if key in slots:
                place = window.key[2] - start
                held[place : place + window.master.numel()].copy_(slots[key])
    return held


def _put_state(found: _Found, own: torch.Tensor, key: str) -> None:
    _check_key(found, key)
    store, unit, state = found.store, found.place.unit, state_of(found.store)
    held = state_held(store, unit, key)
    found.own(held).copy_(own)
    if state is not None and key in state.states.slots:
        state.states.put(unit, {key: held})
    if state is not None and isinstance(state.rule, KeepsState):
        start = store.shards.span(unit).start
        for window in windows_of(state, unit):
            span = Span(window.key[2], window.key[2] + window.master.numel())
            if span.intersect(found.common).numel:
                state.rule.restore(window, {key: held[span.shifted(-start).slice]}, {})


# -- common ------------------------------------------------------------------------------------------------------


def find_place(param: nn.Parameter) -> _Found | None:
    """The place of `param` in its unit; None if it is frozen."""
    if not isinstance(param, nn.Parameter):
        msg = f"a parameter of the model is needed (torch.nn.Parameter), found a {type(param).__name__}"
        raise UsageError(msg)
    owner = sharded_param.owner_of(param)
    place = owner.table.locate(param) if isinstance(owner, ParamStore) else None
    if isinstance(owner, ParamStore) and place is not None:
        owner.require(list(OffloadStateTypeEnum), "access to model states")
        return _Found(owner, place) if place.unit.is_trainable else None
    if not param.requires_grad:
        return None
    msg = (
        f"a parameter of shape {tuple(param.shape)} belongs to no engine that trains it; call mpispeed.initialize "
        "first, with an optimizer that has this parameter, and do not use an engine after destroy()"
    )
    raise UsageError(msg)


def _find_cut(param: nn.Parameter, caller: str) -> _Found | None:
    found = find_place(param)
    if found is not None and not found.store.rests_cut:
        msg = (
            f"{caller}: parameters of this engine are not cut, so that there is no local part; use "
            f"{caller.replace('local', 'full')} instead"
        )
        raise UsageError(msg)
    return found


def _flat(found: _Found, value: Any, numel: int) -> torch.Tensor:
    """`value` flattened, if it has `numel` elements."""
    if not isinstance(value, torch.Tensor) or value.numel() != numel:
        got = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        msg = f"a value for parameter {found.place.entry.name!r} has to be a tensor of {numel} elements, found {got}"
        raise UsageError(msg)
    return value.detach().reshape(-1)


def _stores(found: Sequence[_Found | None]) -> list[ParamStore]:
    return list({id(item.store): item.store for item in found if item is not None}.values())


def _collect(found: Sequence[_Found | None], held: Held, *, are_grads: bool = False) -> list[torch.Tensor | None]:
    """Full values in the shapes of the parameters, gathered unit by unit; local gradients are full already.

    Collective over: the axes over which masters are sharded; the data axis if anything is swapped.

    Raises:
        StoreError: on every rank, if swapped states of one cannot be read.
    """
    results: list[torch.Tensor | None] = [None] * len(found)
    for store in _stores(found):
        mine = [(item.place, at) for at, item in enumerate(found) if item is not None and item.store is store]
        units = {place.unit.index: place.unit for place, _ in mine}
        for index in sorted(units):
            unit = units[index]
            part = _read(held, store, unit)
            full = store.arena.take(unit.layout.padded, part.dtype)
            source = REPLICATED if are_grads and _grads(store).exchange.local_grads else unit.states.master
            all_gather_into(store.mesh, full, part, source, REPLICATED, unit.layout.padded)
            for place, at in mine:
                if place.unit is unit:
                    results[at] = full[place.entry.span.slice].view(place.entry.shape).clone()
            store.arena.give(full)
    return results


def _read(held: Held, store: ParamStore, unit: Unit) -> torch.Tensor:
    """This rank's part, if all ranks have theirs."""
    with store.mesh["data"].together(StoreError) if store.tiers.is_swapping else nullcontext():
        return held(store, unit)
