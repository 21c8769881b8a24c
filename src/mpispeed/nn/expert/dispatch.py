"""Rows to the ranks of their experts and back.

The ranks of an expert-parallel group hold the experts in order, `share` of them each. Counts travel first, then the
rows that there are: nothing is padded, and ranks may have any number of tokens. Between the two exchanges of a layer
and in their backward passes every rank takes part, without rows and without experts too.

With two levels, rows go inside of the node first, to the rank that has the place of their target there, and then
between nodes: one message for each pair of nodes and place instead of one for each pair of ranks. Rows arrive in the
same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from mpispeed.base.errors import TopologyError
from mpispeed.base.even_split import share
from mpispeed.mesh.collectives.work import Work
from mpispeed.mesh.comm import Comm

T = TypeVar("T")

TOKENS_TRAIN, EXPERTS_TRAIN = 1, 2
"""Bits by which ranks tell each other who needs gradients; they travel with the counts."""


Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Swap:
    """A step of rows on their way: an exchange over a group. Units: rows to and from each rank."""

    comm: Comm
    sent: Sequence[int]
    received: Sequence[int]

    def _buffers(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
        out = rows.new_empty((sum(self.received), *rows.shape[1:]))
        width = math.prod(rows.shape[1:])
        received, sent = ([count * width for count in counts] for counts in (self.received, self.sent))
        return out, rows.contiguous(), received, sent

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Exchange rows; no autograd. Collective over: the group."""
        buffers = self._buffers(rows)
        self.comm.all_to_all(*buffers)
        return buffers[0]

    def start(self, rows: torch.Tensor) -> tuple[torch.Tensor, Work]:
        """Begin to exchange rows; the result has them when the work has ended. Collective over: the group."""
        buffers = self._buffers(rows)
        return buffers[0], self.comm.start_all_to_all(*buffers)


@dataclass(frozen=True, slots=True)
class Turn:
    """A step of rows on their way: `transposed`, on this rank."""

    counts: list[list[int]]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder rows."""
        return transposed(rows, self.counts)


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the rows of one pass, from this rank's order (by target) to that of targets (by source), and back.

    Attributes:
        near: first steps there.
        far: the last one, between all ranks or between nodes.
        far_back: first step back.
        near_back: the others.
    """

    near: tuple[Step, ...]
    far: Swap
    far_back: Swap
    near_back: tuple[Step, ...]

    @property
    def there(self) -> tuple[Step, ...]:
        """All steps to the targets."""
        return (*self.near, self.far)

    @property
    def back(self) -> tuple[Step, ...]:
        """All steps back."""
        return (self.far_back, *self.near_back)


@dataclass(frozen=True, slots=True)
class Levels:
    """An expert-parallel group in two levels; rank = node * ranks per node + place.

    Attributes:
        inside: the ranks of this node, by place.
        between: the ranks with this place, by node.
    """

    inside: Comm
    between: Comm


def split_by_node(comm: Comm, ranks_per_node: int) -> Levels:
    """The two levels of a group whose nodes hold equally many consecutive ranks. Collective over: `comm`.

    Raises:
        TopologyError: on every rank; they do not divide.
    """
    if ranks_per_node < 1 or comm.size % ranks_per_node:
        msg = f"{comm.size} ranks of experts cannot be nodes of {ranks_per_node} ranks"
        raise TopologyError(msg)
    node, place = divmod(comm.rank, ranks_per_node)
    start = node * ranks_per_node
    inside = comm.split(node, comm.ranks[start : start + ranks_per_node], comm.axes)
    return Levels(inside, comm.split(place, comm.ranks[place::ranks_per_node], comm.axes))


class Deal:
    """The rows of one pass, once all ranks know their numbers.

    Attributes:
        counts: rows that this rank receives, by source rank and own expert.
    """

    def __init__(self, route: Route | None, counts: list[list[int]], needs: int) -> None:
        self.counts = counts
        self._route, self._needs = route, needs

    @property
    def expert_counts(self) -> list[int]:
        """Rows that this rank receives, by own expert."""
        return [sum(column) for column in zip(*self.counts, strict=True)]

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Send rows sorted by expert; the result is sorted by own expert, then source. Collective over: group."""
        if self._route is not None:
            anchor = _anchor(rows, bool(self._needs & TOKENS_TRAIN))
            rows = _Sent.apply(rows, anchor, self._route.there, self._route.back)
        return transposed(rows, self.counts)

    def back(self, rows: torch.Tensor) -> torch.Tensor:
        """Send what experts made of the rows back to their sources. Collective over: group."""
        rows = transposed(rows, _turned(self.counts))
        if self._route is None:
            return rows
        anchor = _anchor(rows, self._needs != 0)
        returned: torch.Tensor = _Sent.apply(rows, anchor, self._route.back, self._route.there)
        return returned

    def back_beside(self, rows: torch.Tensor, work: Callable[[], T]) -> tuple[torch.Tensor, T]:
        """As `back`, with `work` done while rows travel; its backward while their gradients do.

        Collective over: the group.
        """
        rows = transposed(rows, _turned(self.counts))
        if self._route is None:
            return rows, work()
        crossing = _Crossing(self._route)
        under_way = _Left.apply(rows, _anchor(rows, self._needs != 0), crossing)
        done = work()
        returned: torch.Tensor = _Arrived.apply(under_way, crossing)
        return returned, done


class Dispatcher:
    """Exchanges rows over an expert-parallel group."""

    def __init__(self, comm: Comm, num_experts: int, levels: Levels | None = None) -> None:
        """`levels`: exchange in two levels, with equal results."""
        self.comm, self._levels = comm, levels
        ranges = (share(num_experts, rank, comm.size) for rank in range(comm.size))
        self._lengths = [stop - start for start, stop in ranges]

    def deal(self, counts: torch.Tensor, needs: int = 0) -> Deal:
        """Tell all ranks how many rows they get.

        Args:
            counts: rows of this rank for each expert, int64 in host memory.
            needs: `TOKENS_TRAIN` and `EXPERTS_TRAIN`, where gradients are wanted here.

        Collective over: the group.
        """
        own = self._lengths[self.comm.rank]
        if self.comm.size == 1:
            return Deal(None, [counts.tolist()], needs)
        note = torch.tensor([needs])
        told = torch.cat([part for each in counts.split(self._lengths) for part in (each, note)])
        sent = [int(each.sum()) for each in counts.split(self._lengths)]
        lengths = [length + 1 for length in self._lengths]
        if self._levels is None:
            heard = told.new_zeros((self.comm.size, own + 1))
            self.comm.all_to_all(heard, told, [own + 1] * self.comm.size, lengths)
            route = one_level(self.comm, sent, heard[:, :own].sum(1).tolist())
        else:
            heard, passing = _tell(self._levels, told, lengths)
            route = two_levels(self._levels, sent, passing, heard[:, :own].sum(1).tolist())
        everyone = 0
        for note_of_rank in heard[:, own].tolist():
            everyone |= note_of_rank
        return Deal(route, heard[:, :own].tolist(), everyone)

    def balanced(self, counts: Sequence[int]) -> Route | None:
        """The way of rows if every rank had so many for each expert; None on one rank. Local."""
        if self.comm.size == 1:
            return None
        sent = [int(each.sum()) for each in torch.tensor(counts, device="cpu").split(self._lengths)]
        received = [sent[self.comm.rank]] * self.comm.size
        if self._levels is None:
            return one_level(self.comm, sent, received)
        places = self._levels.inside.size
        passing = [sent[self._levels.inside.rank :: places]] * places
        return two_levels(self._levels, sent, passing, received)


def one_level(comm: Comm, sent: Sequence[int], received: Sequence[int]) -> Route:
    """Rows straight to their targets; `sent` and `received` by rank."""
    return Route((), Swap(comm, sent, received), Swap(comm, received, sent), ())


def two_levels(levels: Levels, sent: list[int], passing: list[list[int]], received: list[int]) -> Route:
    """Rows inside of the node, then between nodes.

    `sent` and `received` by rank; `passing`: rows through this rank, by the place that they come from and node.
    """
    places = levels.inside.size
    by_node = [sent[start : start + places] for start in range(0, len(sent), places)]
    arriving = [sum(received[start : start + places]) for start in range(0, len(received), places)]
    near, through = _columns(by_node), [sum(row) for row in passing]
    leaving = _columns(passing)
    return Route(
        (Turn(by_node), Swap(levels.inside, near, through), Turn(passing)),
        Swap(levels.between, leaving, arriving),
        Swap(levels.between, arriving, leaving),
        (Turn(_turned(passing)), Swap(levels.inside, through, near), Turn(_turned(by_node))),
    )


def follow(steps: Iterable[Step], rows: torch.Tensor) -> torch.Tensor:
    """Rows after these steps; no autograd. Collective over: the groups of the steps."""
    for step in steps:
        rows = step(rows)
    return rows


def transposed(rows: torch.Tensor, counts: list[list[int]]) -> torch.Tensor:
    """Blocks of rows that are sorted by (i, j), of `counts[i][j]` rows each, sorted by (j, i)."""
    if len(counts) <= 1 or len(counts[0]) <= 1:
        return rows
    blocks = rows.split([count for row in counts for count in row])
    width = len(counts[0])
    return torch.cat([blocks[i * width + j] for j in range(width) for i in range(len(counts))])


def _turned(counts: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]


def _columns(counts: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _tell(levels: Levels, told: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, list[list[int]]]:
    """Counts by both levels: those for this rank by source rank, and the rows that pass through it.

    Collective over: both levels.
    """
    inside, between = levels.inside, levels.between
    places, nodes = inside.size, between.size
    by_node = [lengths[node * places : (node + 1) * places] for node in range(nodes)]
    mine = [by_node[node][inside.rank] for node in range(nodes)]
    first = transposed(told, by_node)
    heard = told.new_zeros((places, sum(mine)))
    inside.all_to_all(heard, first, [sum(mine)] * places, _columns(by_node))
    parts = heard.split(mine, 1)
    passing = torch.stack([part[:, :-1].sum(1) for part in parts], 1).tolist()
    own = by_node[between.rank][inside.rank]
    found = told.new_zeros((nodes * places, own))
    second = torch.cat([part.reshape(-1) for part in parts])
    between.all_to_all(found, second, [places * own] * nodes, [places * length for length in mine])
    return found, passing


def _anchor(rows: torch.Tensor, needs_gradients: bool) -> torch.Tensor:
    """An input without elements that puts an exchange into the graph of every rank, or of none."""
    return rows.new_zeros(0, requires_grad=needs_gradients)


class _Sent(torch.autograd.Function):
    """Rows that take the steps of `way`; their gradients take those of `reverse`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, _: torch.Tensor, way: tuple[Step, ...], reverse: tuple[Step, ...]
    ) -> torch.Tensor:
        ctx.reverse = reverse
        return follow(way, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return follow(ctx.reverse, grad.contiguous()), None, None, None


class _Crossing:
    """Rows that are under way: back, and their gradients there."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._started: list[tuple[torch.Tensor, Work]] = []

    def leave_back(self, rows: torch.Tensor) -> None:
        """Start the way back. Collective over: the group."""
        self._started.append(self._route.far_back.start(rows))

    def arrive_back(self) -> torch.Tensor:
        """The rows, at the end of the way back. Collective over: the group."""
        return follow(self._route.near_back, self._ended())

    def leave_there(self, grad: torch.Tensor) -> None:
        """Start the last step of the way there. Collective over: the group."""
        self._started.append(self._route.far.start(follow(self._route.near, grad)))

    def arrive_there(self) -> torch.Tensor:
        """Gradients at the end of the way there. Collective over: the group."""
        return self._ended()

    def _ended(self) -> torch.Tensor:
        rows, work = self._started.pop()
        work.wait()
        return rows


class _Left(torch.autograd.Function):
    """Rows leave; the result, without elements, stands for them until `_Arrived`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, anchor: torch.Tensor, crossing: _Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        crossing.leave_back(rows)
        return anchor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.crossing.arrive_there(), None, None


class _Arrived(torch.autograd.Function):
    """Rows at the end of their way back; their gradients leave."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, crossing: _Crossing) -> torch.Tensor:
        ctx.crossing = crossing
        return crossing.arrive_back()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.crossing.leave_there(grad.contiguous())
        return grad.new_zeros(0), None
