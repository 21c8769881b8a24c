"""How the whole of a cut unit comes together: plainly, as 8-bit codes, or from a second copy nearby."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mpispeed.base.errors import StoreError
from mpispeed.store.move import own_span, widen
from mpispeed.store.placement import WHOLE, Placement
from mpispeed.zero.quantized import Codes

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Work
    from mpispeed.store.cell import Cell, Loan
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
        self, lane: Mesh, unit: Unit, full: torch.Tensor, rest: Cell, source: Placement,
        reader: Callable[[], str],
    ) -> Work:  # fmt: skip
        """Start to fill `full` with the whole unit; `rest` is what rests here under `source`.

        Collective over: the axes of `source`, or of the second copy while that is fresh.

        Raises:
            StoreError: from the work's `wait`, on every rank, if one of them cannot read what rests there.
        """
        codes, second = self.codes.get(unit.index), self._second
        copy = self._copies[unit.index] if unit.index in self._fresh else None
        if copy is not None and second is not None:
            source = second
        # Reading begins now, whatever the lane is at.
        loan = rest.lend(0, rest.numel) if copy is None and codes is None else None

        def collect(_: Any) -> None:
            if copy is not None:
                widen(lane, full, copy, source, WHOLE, unit.layout.padded)
                return
            if codes is not None:
                codes.widen(lane, full, source, WHOLE)
            elif loan is not None:
                self._widen(lane, full, loan.wait(), source, WHOLE, unit.layout.padded)
            if second is not None:
                self._take(second, unit, full)

        work = lane[source.axes].start(
            collect,
            "fetch",
            label=f"unit {unit.index}",
            describe=lambda: f"the parameters of {unit.name!r} for {reader()}",
            ready=partial(_outcome, loan) if loan is not None and rest.is_swapped else None,
        )
        if loan is not None:
            # Also if another rank cannot read its part and this one's was lent in vain.
            work.after(partial(loan.give_back, changed=False))
        return work

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
        """Bytes of coded shards on this rank."""
        return sum(codes.nbytes for codes in self.codes.values())


def _outcome(loan: Loan) -> str | None:
    """Whether what was lent is here: None: not yet; "": yes; else why it never will be."""
    if not loan.is_ready():
        return None
    try:
        loan.wait()
    except StoreError as error:
        return str(error)
    return ""
