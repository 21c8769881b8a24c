"""Divergent fetch: ranks whose forward passes differ agree in rounds on the units to gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.work import Wait
    from mpispeed.mesh.mesh import Mesh

_BITS = 62


class DivergentFetch:
    """Agreement on the union of the wanted units, before every fetch.

    In a round every rank names the units it lacks, or none once it is done. All ranks gather the union: a rank that did
    not ask takes part with scratch memory. Rounds pair up by number, so a rank may run modules that others never enter.

    Collective over: the group, for every method.
    """

    def __init__(self, channel: Mesh, axes: tuple[str, ...], units: int, *, wait: Wait) -> None:
        """Args: `units` is the number of units; `wait` as for `Prefetcher`."""
        self._comm, self._wait, self._units = channel[axes], wait, units
        self._words = -(-units // _BITS) + 1
        self.count = 0

    def ask(self, wanted: Sequence[int], what: Callable[[], str]) -> list[int]:
        """Indices of the units that any rank wants in this round, ascending; includes `wanted`."""
        union, _ = self._exchange(wanted, is_done=False, what=what)
        return union

    def finish(self, serve: Callable[[int], None], what: Callable[[], str]) -> None:
        """Serve the other ranks until all have called this."""
        while True:
            union, is_over = self._exchange((), is_done=True, what=what)
            for index in union:
                serve(index)
            if is_over:
                return

    def _exchange(self, wanted: Sequence[int], *, is_done: bool, what: Callable[[], str]) -> tuple[list[int], bool]:
        own = [0] * self._words
        own[0] = int(is_done)
        for index in wanted:
            own[1 + index // _BITS] |= 1 << index % _BITS
        mine = torch.tensor(own, dtype=torch.int64)
        all_ranks = torch.empty(self._words * self._comm.size, dtype=torch.int64)
        self.count += 1
        work = self._comm.start(
            lambda comm: comm.all_gather(all_ranks, mine), "round", label=f"{self.count}", describe=what
        )
        self._wait(work, what)
        rows = all_ranks.view(self._comm.size, self._words).tolist()
        bits = [0] * (self._words - 1)
        for row in rows:
            bits = [have | more for have, more in zip(bits, row[1:], strict=True)]
        union = [index for index in range(self._units) if bits[index // _BITS] >> index % _BITS & 1]
        return union, all(row[0] for row in rows)
