"""Coordinates of ranks on named axes under DeepSpeed's names. Arithmetic only, no communication."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mpispeed.base.errors import TopologyError, UnknownAxis
from mpispeed.mesh.mesh import Topology


class ProcessTopology:
    """Ranks on a grid of named axes; the last axis varies fastest with the rank.

    Args:
        axes: names, slowest first; each an identifier.
        dims: their sizes.

    Raises:
        TopologyError: a name or a size that cannot be.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        if len(self.axes) != len(self.dims) or len(set(self.axes)) != len(self.axes):
            msg = f"the axes {self.axes} and their sizes {self.dims} do not fit: each axis has one name and one size"
            raise TopologyError(msg)
        self.grid = Topology(dict(zip(self.axes, self.dims, strict=True)))
        try:
            self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        except ValueError as error:
            msg = f"the axes {self.axes} cannot be named so: {error}"
            raise TopologyError(msg) from error

    @cached_property
    def mapping(self) -> dict[Any, int]:
        """Rank of each coordinate, in the order of ranks. Grows with the number of ranks."""
        return {self.get_coord(rank): rank for rank in range(self.world_size())}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Rank at one full coordinate.

        Raises:
            TopologyError: not one coordinate for each axis (a ValueError), or outside of the grid (an AssertionError).
        """
        if len(coord_kwargs) != len(self.axes):
            msg = (
                f"get_rank needs a coordinate for each of the axes {self.axes}, got {coord_kwargs}; for several ranks "
                "use filter_match"
            )
            raise TopologyError(msg)
        return self.grid.rank(**coord_kwargs)

    def get_axis_names(self) -> list[str]:
        """Names of the axes."""
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The coordinates of a rank as text, such as `model_00`; "" where all axes are left out."""
        at = self.grid.coords(rank)
        return outer_sep.join(f"{axis}{inner_sep}{at[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """Size of an axis; 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank, with one field for each axis.

        Raises:
            TopologyError: there is no such rank; a ValueError too.
        """
        return self.ProcessCoord(*self.grid.coords(rank).values())

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Groups of ranks that differ only along `axis`; none where there is no such axis."""
        return [list(group) for group in self.grid.groups(axis)] if axis in self.axes else []

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Ranks, ascending, whose coordinates equal all given ones.

        Raises:
            UnknownAxis: there is no such axis; an AttributeError too.
        """
        for axis in filter_kwargs:
            if axis not in self.axes:
                msg = f"filter_match: there is no axis {axis!r}, only {', '.join(self.axes)}"
                raise UnknownAxis(msg)
        return list(self.grid.match(**filter_kwargs))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Ranks at `idx` of `axis`.

        Raises:
            UnknownAxis: there is no such axis; a ValueError too.
        """
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """Number of ranks."""
        return self.grid.size

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Stages, each of several data-parallel ranks: neighbouring ranks reduce gradients with each other."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages, data-parallel ranks, and slices of layers, which are neighbours: axes are ordered pipe, data, model."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:
    """Prime factors of N with their multiplicity, ascending.

    Raises:
        TopologyError: N is not positive; a ValueError too.
    """
    if N <= 0:
        msg = f"{N} has no prime factors; only positive numbers have"
        raise TopologyError(msg)
    factors: list[int] = []
    rest, divisor = N, 2
    while divisor * divisor <= rest:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    return [*factors, rest] if rest > 1 else factors
