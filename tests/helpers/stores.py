"""Gradient stores on simulated ranks, at any placement."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpispeed.mesh.mesh import Factor, Mesh
from mpispeed.plan.placements import Placing
from mpispeed.sharding.grad_shards import GradShards
from mpispeed.sharding.grads import GradStore
from mpispeed.sharding.reducers import Averaging, SumChannel, SumGradients
from mpispeed.sharding.units import plan_units
from mpispeed.store.layout import Table, Unit
from mpispeed.store.placement import Placement
from mpispeed.store.unit_states import UnitStates

WHOLE, DATA = Placement(), Placement(("data",))
INNER, NESTED = Placement(("data.inner",)), Placement(("data.inner", "data.outer"))
NODES = Placement(("data.local", "data.across"))


def mesh_of(world: Any, inner: int = 0, local: int = 0, reduction: str = "ordered") -> Mesh:
    """One data axis, divided in groups of `inner`, and these in nodes of `local`, unless 0."""
    factors = [Factor("data.inner", inner, "inner", rest="data.outer")] if inner else []
    factors += [Factor("data.local", local, "local")] if local else []
    rings = (("data.across", "data.inner", "data.local"),) if inner and local else ()
    topology = Placing(None, tuple(factors), rings=rings).topology({"pipe": 1, "data": world.size, "model": 1})
    return Mesh(topology, world, reduction=reduction)


def small_model() -> nn.Module:
    """Three units."""
    return nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 30), nn.Linear(30, 20))


def table_of(model: nn.Module, parts: int) -> Table:
    """Units without a limit."""
    return plan_units(model, {id(p): 0 for p in model.parameters()}, parts, 10**9)


def placed(table: Table, mesh: Mesh, rest: Placement, target: Placement | None = None, **dtypes: Any) -> Table:
    """The table with gradients at `rest` and masters at `target`; dtypes are fp32 unless given, and those of fp64."""
    more = {"accumulate": torch.float32, "wire": torch.float32, **dtypes}

    def states(unit: Unit) -> UnitStates:
        own = dict.fromkeys(more, torch.float64) if unit.dtype == torch.float64 else more
        return UnitStates.of(mesh.topology, grad=rest, master=target or rest, **own)

    return table.with_states(states)


def store_of(mesh: Mesh, rest: Placement, target: Placement | None = None, **more: Any) -> GradStore:
    """A store over `small_model`; `more`: a table, dtypes, and arguments of the objects of which the store is made."""
    size = mesh["data"].size
    table = more.pop("table", None) or table_of(small_model(), size)
    dtypes = {name: more.pop(name) for name in ("accumulate", "wire") if name in more}
    shards = GradShards(placed(table, mesh, rest, target, **dtypes), mesh)
    channel = SumChannel.of(mesh, is_overlapped=more.pop("is_overlapped", False))
    averaging, requires_all = more.pop("averaging", Averaging.of(size)), more.pop("requires_all", False)
    sums = SumGradients(shards, channel.mesh, averaging, **more)
    return GradStore(shards, sums, channel, requires_all=requires_all)


def gradient(rank: int, micro: int, entry: Any) -> torch.Tensor:
    """The same values for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * micro + entry.offset)
    return torch.randn(entry.shape, generator=generator)


def backward(store: GradStore, rank: int, micro: int, *, reduces: bool, skip: tuple[str, ...] = ()) -> None:
    """One backward pass that lands `gradient` everywhere."""
    store.begin_backward(reduces=reduces)
    for unit in reversed(store.table.units):
        for entry in reversed(unit.layout.entries):
            if entry.name not in skip:
                store.land(unit, entry, gradient(rank, micro, entry))
    store.end_backward()


def collect(mesh: Mesh, store: GradStore) -> list[torch.Tensor]:
    """Each unit's gradients as one whole buffer, from all ranks' ranges; fails if copies differ."""
    found = []
    for unit in store.table.units:
        span = store.shards.target_span(unit)
        whole = torch.full((unit.layout.padded,), float("nan"))
        for start, values in mesh["data"].gather_objects((span.start, store.shards.reduced(unit).clone())):
            there = whole[start : start + values.numel()]
            assert bool(there.isnan().all()) or torch.equal(there, values.float())
            there.copy_(values)
        found.append(whole)
    return found
