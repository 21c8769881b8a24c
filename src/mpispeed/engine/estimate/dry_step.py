"""Optimizer steps of one rank without data: the parts of a run on torch's meta device, over a mesh where nothing moves.

Modules are taken in the order of their registration, backward in reverse; a model that runs them in another order,
several times or not at all differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from mpispeed.sharding.grad_shards import global_square_sum
from mpispeed.sharding.param_shards import ParamShards
from mpispeed.sharding.prefetch import Prefetcher

if TYPE_CHECKING:
    from mpispeed.engine.replica_groups import Sharing
    from mpispeed.mesh.collectives.group import Record
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grads import GradStore
    from mpispeed.sharding.module_units import ModuleUnits
    from mpispeed.store.layout import Unit

STEPS = 3
"""Optimizer steps of a dry run: the order is recorded in the first and known from the second on."""

MICRO_STEPS = 4
"""Micro-steps that are run, at most; those from the third to the last but one are alike, and count several times."""

_SAVES_NO_WEIGHT = (nn.Embedding, nn.EmbeddingBag)
"""Their backward pass needs the indices only."""

_OF_CHANNEL = {"params": "parameters", "grads": "gradients"}
"""What the operations on a channel send."""

Key = tuple[str, str, tuple[str, ...]]
"""What is sent, the verb, the axes."""


class DryParams(ParamShards):
    """Shards of parameters on meta; the model's own parameters stay as they are."""

    def unshard(self, unit: Unit, full: torch.Tensor) -> None:
        """Do nothing."""

    def reshard(self, unit: Unit) -> None:
        """Do nothing."""

    def adopt_all(self) -> None:
        """Take over all units."""
        for unit in self.table.all_units:
            self.adopt(unit, torch.empty(unit.layout.padded, dtype=unit.dtype, device=self.tiers.device))


class Journal:
    """Bytes sent by one rank, by what they are for; each call counts `weight` times."""

    def __init__(self, mesh: Mesh) -> None:
        self.sent: Counter[Key] = Counter()
        self.what, self.weight, self._world = "", 1, mesh.world
        mesh.world.comm_trace.subscribe(self._read)

    def _read(self, record: Record) -> None:
        channel: str = self._world.running  # type: ignore[attr-defined]
        self.sent[_OF_CHANNEL.get(channel, self.what), record.verb, record.axes] += record.sent_bytes * self.weight


@dataclass(slots=True)
class Outcome:
    """Traffic of the last of several steps, and peaks of memory over all of them. Units: bytes.

    `fetches` counts reads of this rank's shards for gathers, by unit.
    """

    sent: dict[Key, int] = field(default_factory=dict)
    fetches: Counter[int] = field(default_factory=Counter)
    gathered_bytes: int = 0
    scratch_bytes: int = 0


class DryRun:
    """Steps of one rank: forward and backward passes, sums, and the collection of updated parameters."""

    def __init__(
        self,
        model: nn.Module,
        params: DryParams,
        grads: GradStore,
        sharing: Sharing,
        users: Sequence[ModuleUnits],
        prefetcher: Prefetcher | None,
        *,
        gathers_once: bool = False,
    ) -> None:
        self._model, self._params, self._grads, self._sharing = model, params, grads, sharing
        self._users, self._prefetcher, self._gathers_once = users, prefetcher, gathers_once
        self._modules = [(module, own) for module in model.modules() if (own := list(module.parameters(recurse=False)))]
        self._cut = [unit for unit in params.table.all_units if not params.is_resident(unit)]
        self._journal = Journal(params.mesh)
        self._fetches: Counter[int] = Counter()
        self._gradients = {
            entry.name: torch.empty(entry.shape, dtype=params.dtypes(unit)[0], device="meta")
            for unit in params.table.units
            for entry in unit.layout.entries
        }

    def run(self, micro_steps: int) -> Outcome:
        """Run `STEPS` optimizer steps of `micro_steps` micro-batches."""
        for _ in range(STEPS):
            self._journal.sent.clear()
            self._fetches.clear()
            self._step(micro_steps)
        fetcher = self._prefetcher
        return Outcome(
            dict(self._journal.sent),
            self._fetches,
            0 if fetcher is None else fetcher.tally.peak_bytes,
            self._params.arena.owned_bytes,
        )

    def _step(self, micro_steps: int) -> None:
        params, grads, fetcher = self._params, self._grads, self._prefetcher
        if fetcher is not None and self._gathers_once:
            fetcher.open(self._cut)
        played = min(micro_steps, MICRO_STEPS)
        for micro in range(played):
            self._journal.weight = micro_steps - played + 1 if micro == played - 2 else 1
            self._micro_step(is_last=micro == played - 1)
        self._journal.weight = 1
        grads.finish()
        if fetcher is not None and self._gathers_once:
            fetcher.close(self._cut)
        if not params.table.units:
            return
        with torch.no_grad():
            self._journal.what = "shared"
            self._sharing.sum(grads)
            self._journal.what = "gradient norm"
            global_square_sum(params.mesh, grads.shards, threads=1)
            self._journal.what = "updated parameters"
            if fetcher is not None:
                fetcher.reshard_all()
            for unit in params.table.units:
                params.publish(unit)
        grads.clear()

    def _micro_step(self, *, is_last: bool) -> None:
        fetcher = None if self._gathers_once else self._prefetcher
        if fetcher is not None:
            self._forward(fetcher)
        self._grads.begin_backward(reduces=is_last)
        self._backward(fetcher)
        self._grads.end_backward()

    # -- forward -----------------------------------------------------------------------------------------------

    def _forward(self, fetcher: Prefetcher) -> None:
        fetcher.begin_pass(True)
        running: list[ModuleUnits] = []
        for user in self._users:
            while running and running[-1].name and not user.name.startswith(f"{running[-1].name}."):
                fetcher.unhold(running.pop().units, reshards=True)
            if user.units:
                fetcher.unshard(user.units, is_backward=False, reader=lambda: "a module")
                fetcher.hold(user.units)
            running.append(user)
        for user in reversed(running):
            fetcher.unhold(user.units, reshards=True)

    # -- backward ----------------------------------------------------------------------------------------------

    def _backward(self, fetcher: Prefetcher | None) -> None:
        table, grads = self._params.table, self._grads
        left = Counter(id(param) for _, params in self._modules for param in params)
        for module, params in reversed(self._modules):
            places = [place for param in params if (place := table.locate(param)) is not None]
            units = {place.unit.index: place.unit for place in places if not self._params.is_resident(place.unit)}
            if fetcher is not None and units and not isinstance(module, _SAVES_NO_WEIGHT):
                fetcher.unshard(tuple(units.values()), is_backward=True, reader=lambda: "a module")
            for param in params:
                left[id(param)] -= 1
                place = table.find(param)
                if place is not None and not left[id(param)]:
                    with torch.no_grad():
                        grads.land(place.unit, place.entry, self._gradients[place.entry.name])
                    if fetcher is not None and grads.has_landed(place.unit):
                        fetcher.reshard_unused((place.unit.index,))
        if fetcher is not None:
            fetcher.reshard_idle()
