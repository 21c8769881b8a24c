"""How the whole of a cut unit comes together: plainly, as 8-bit codes, or from a second copy nearby."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.store.move import own_span, widen
from mpispeed.store.placement import WHOLE, Placement
from mpispeed.zero.quantized import Codes

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Work
    from mpispeed.store.table import Unit


class Widener(Protocol):
    """Carries a gather out, in some coding."""

    def __call__(
        self, mesh: Mesh, out: torch.Tensor, shard: torch.Tensor, source: Placement, target: Placement, padded: int
    ) -> None:
        """As `store.move.widen`."""


class Collector:
    """Gathers units, and keeps what makes gathers cheaper: second copies, and codes of frozen shards.

    Source: ZeRO++ (arXiv 2306.10209): hpZ, the second copy, is taken when a unit was whole and is gathered from until
    the next update.
    """

    def __init__(self, mesh: Mesh, *, widener: Widener = widen, second: Placement | None = None) -> None:
        """Args: `second` is how a second copy is cut; it begins the placement at rest."""
        self._mesh, self._widen, self._second = mesh, widener, second
        self._copies: dict[int, torch.Tensor] = {}
        self._fresh: set[int] = set()
        self.codes: dict[int, Codes] = {}

    def start(
        self, lane: Mesh, unit: Unit, full: torch.Tensor, shard: torch.Tensor, source: Placement,
        reader: Callable[[], str],
    ) -> Work:  # fmt: skip
        """Start to fill `full` with the whole unit; `shard` is what rests here under `source`.

        Collective over: the axes of `source`, or of the second copy while that is fresh.
        """
        codes, second = self.codes.get(unit.index), self._second
        copy = self._copies[unit.index] if unit.index in self._fresh else None
        if copy is not None and second is not None:
            source = second

        def collect(_: Any) -> None:
            if copy is not None:
                widen(lane, full, copy, source, WHOLE, unit.layout.padded)
                return
            if codes is not None:
                codes.widen(lane, full, source, WHOLE)
            else:
                self._widen(lane, full, shard, source, WHOLE, unit.layout.padded)
            if second is not None:
                self._take(second, unit, full)

        return lane[source.axes].start(
            collect,
            "fetch",
            label=f"unit {unit.index}",
            describe=lambda: f"the parameters of {unit.name!r} for {reader()}",
        )

    def _take(self, second: Placement, unit: Unit, full: torch.Tensor) -> None:
        part = full[own_span(self._mesh, second, unit.layout.padded).slice]
        if unit.index in self._copies:
            self._copies[unit.index].copy_(part)
        else:
            self._copies[unit.index] = part.clone()
        self._fresh.add(unit.index)

    def forget(self, unit: Unit) -> None:
        """The second copy of `unit` is out of date."""
        self._fresh.discard(unit.index)

    @property
    def second_bytes(self) -> int:
        """Bytes of second copies on this rank."""
        return sum(copy.nbytes for copy in self._copies.values())

    @property
    def code_bytes(self) -> int:
        """Bytes of coded shards on this rank."""
        return sum(codes.nbytes for codes in self.codes.values())
