"""Ranks that take different ways through a model still gather together: in rounds, all that any of them wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.mesh.work import Wait

_BITS = 62


class Rounds:
    """Agreement before every fetch on the union of what ranks want.

    In a round every rank says what it lacks, or that it lacks nothing until the others are done too. All gather the
    union: a rank that did not ask takes part with scratch memory. Rounds pair up by number, so nothing else has to be
    alike: a rank may run modules that others never enter.

    Collective over: the group, for every method.
    """

    def __init__(self, lane: Mesh, axes: tuple[str, ...], units: int, *, wait: Wait) -> None:
        """Args: `units` is their number; `wait` as for `Fetcher`."""
        self._comm, self._wait, self._units = lane[axes], wait, units
        self._words = -(-units // _BITS) + 1
        self.count = 0

    def ask(self, wanted: Sequence[int], what: Callable[[], str]) -> list[int]:
        """Indices that any rank wants in this round, ascending; `wanted` are among them."""
        union, _ = self._exchange(wanted, is_done=False, what=what)
        return union

    def finish(self, serve: Callable[[int], None], what: Callable[[], str]) -> None:
        """Serve the others until all ranks have come here."""
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
