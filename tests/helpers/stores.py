"""Gradient stores on simulated ranks, at any placement."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mpispeed.mesh.mesh import Factor, Mesh
from mpispeed.plan.placements import Placing
from mpispeed.sharding.grads import Averaging, GradStore
from mpispeed.sharding.units import plan_units
from mpispeed.store.placement import Placement
from mpispeed.store.table import Table

WHOLE, DATA = Placement(), Placement(("data",))
INNER, NESTED = Placement(("data.inner",)), Placement(("data.inner", "data.outer"))
NODES = Placement(("data.local", "data.across"))


def mesh_of(world: Any, inner: int = 0, local: int = 0, reduction: str = "ordered") -> Mesh:
    """One data axis, divided in groups of `inner`, and these in nodes of `local`, unless 0."""
    factors = [Factor("data.inner", inner, "inner", rest="data.outer")] if inner else []
    factors += [Factor("data.local", local, "local")] if local else []
    topology = Placing(None, tuple(factors)).topology({"pipe": 1, "data": world.size, "model": 1})
    return Mesh(topology, world, reduction=reduction)


def small_model() -> nn.Module:
    """Three units."""
    return nn.Sequential(nn.Linear(5, 70), nn.Linear(70, 30), nn.Linear(30, 20))


def table_of(model: nn.Module, parts: int) -> Table:
    """Units without a limit."""
    return plan_units(model, {id(p): 0 for p in model.parameters()}, parts, 10**9)


def store_of(mesh: Mesh, rest: Placement, target: Placement | None = None, **more: Any) -> GradStore:
    """A store over `small_model`; `more` overrides the arguments of `GradStore`."""
    size = mesh["data"].size
    arguments: dict[str, Any] = {
        "accumulate": torch.float32,
        "communicate": torch.float32,
        "averaging": Averaging.of(size),
        "is_overlapped": False,
        **more,
    }
    table = arguments.pop("table", None) or table_of(small_model(), size)
    return GradStore(table, mesh, rest=rest, target=target or rest, **arguments)


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
        span = store.target_span(unit)
        whole = torch.full((unit.layout.padded,), float("nan"))
        for start, values in mesh["data"].gather_objects((span.start, store.reduced(unit).clone())):
            there = whole[start : start + values.numel()]
            assert bool(there.isnan().all()) or torch.equal(there, values.float())
            there.copy_(values)
        found.append(whole)
    return found
