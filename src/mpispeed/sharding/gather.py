"""Gathers of sharded units: plain, as 8-bit codes, or from a second copy over fewer ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import StoreError
from mpispeed.sharding.quantized import Codes
from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.transfers import all_gather_into, own_span

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Work
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Span
    from mpispeed.store.stored_tensor import Lease, StoredTensor
    from mpispeed.store.table import Unit


class UnitGather(Protocol):
    """Carries out a gather, plain or quantized."""

    def __call__(
        self, mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
    ) -> None:
        """As `store.transfers.all_gather_into`."""


class UnitGatherer:
    """Gathers units; holds second copies and the codes of frozen shards.

    Source: ZeRO++ (arXiv 2306.10209): hpZ: the second copy is taken while a unit is unsharded, and gathers read it
    until the next update.
    """

    def __init__(self, mesh: Mesh, *, gather: UnitGather = all_gather_into, second: Placement | None = None) -> None:
        """Args: `second` is the placement of second copies, a prefix of the placement at rest."""
        self._mesh, self._gather, self._second = mesh, gather, second
        self._copies: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        self.codes: dict[int, Codes] = {}

    def start(
        self, channel: Mesh, unit: Unit, full: torch.Tensor, rest: StoredTensor, source: Placement,
        reader: Callable[[], str],
    ) -> Work:  # fmt: skip
        """Start to fill `full` with the whole unit; `rest` is this rank's shard under `source`.

        Collective over: the axes of `source`, or of the second copy while that is fresh.

        Raises:
            StoreError: from the work's `wait`, on every rank, if one of them cannot read its shard.
        """
        codes, second = self.codes.get(unit.index), self._second
        copy = self._copies[unit.index] if unit.index in self._fresh else None
        if copy is not None and second is not None:
            source = second
        # Reading begins now, before the channel gets to the gather.
        lease = rest.lend(0, rest.numel) if copy is None and codes is None else None

        def collect(_: Any) -> None:
            if copy is not None:
                all_gather_into(channel, full, copy, source, REPLICATED, unit.layout.padded)
                return
            if codes is not None:
                codes.all_gather_into(channel, full, source, REPLICATED)
            elif lease is not None:
                self._gather(channel, full, lease.wait(), source, REPLICATED, unit.layout.padded)
            if second is not None:
                self._take(second, unit, full)

        work = channel[source.axes].start(
            collect,
            "fetch",
            label=f"unit {unit.index}",
            describe=lambda: f"the parameters of {unit.name!r} for {reader()}",
            ready=partial(_outcome, lease) if lease is not None and rest.is_swapped else None,
        )
        if lease is not None:
            # Also when another rank cannot read its shard.
            work.after(partial(lease.give_back, changed=False))
        return work

    def _take(self, second: Placement, unit: Unit, full: torch.Tensor) -> None:
        part = full[own_span(self._mesh, second, unit.layout.padded).slice]
        if unit.index in self._copies:
            self._copies[unit.index].copy_(part)
        else:
            with torch.inference_mode(False):  # later gathers write to it outside of that mode
                self._copies[unit.index] = part.clone()
        self._fresh.add(unit.index)

    def copy_of(self, unit: Unit) -> tuple[torch.Tensor, Span] | None:
        """The second copy of a unit while it is fresh, and its range of the flat buffer."""
        if unit.index not in self._fresh or self._second is None:
            return None
        return self._copies[unit.index], own_span(self._mesh, self._second, unit.layout.padded)

    def forget(self, unit: Unit) -> None:
        """Mark the second copy of `unit` as out of date."""
        self._fresh.discard(unit.index)

    def drop_copies(self) -> None:
        """Free second copies."""
        self._copies.clear()
        self._fresh.clear()

    @property
    def second_bytes(self) -> int:
        """Bytes of second copies on this rank."""
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def code_bytes(self) -> int:
        """Bytes of quantized shards on this rank."""
        return sum(codes.nbytes for codes in self.codes.values())


def _outcome(lease: Lease) -> str | None:
    """State of a lease: None while it is pending, "" once the data are here, else the error."""
    if not lease.is_ready():
        return None
    try:
        lease.wait()
    except StoreError as error:
        return str(error)
    return ""
