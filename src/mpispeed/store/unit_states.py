"""The states of one unit: its row in the table of placements, with dtypes and copies. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.store.placement import REPLICATED, Placement
from mpispeed.store.state_code import PLAIN, StateCodes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mpispeed.mesh.mesh import Topology

DATA_AXES = ("data",)
"""Each data-parallel rank sees its own samples, so raw gradients are partial sums over this axis."""


@dataclass(frozen=True, slots=True)
class Copies:
    """A group of ranks along another axis than data that have copies of a unit. One of them counts and writes it.

    Attributes:
        axis: "model" for slices that replicate it, "pipe" for stages that share a tied module.
        key: of the tied module, "" for slices.
        is_partial: the copies saw different data, and their gradients add up; else each has the whole gradient.
    """

    axis: str
    key: str = ""
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class UnitStates:
    """Placement, dtype and copies of each state of one unit.

    Masters and the optimizer's states share `master`; gradients are reduced into that placement. Persistent units have
    a replicated `param`. Placements carry the tier of this unit's state, whatever that of others is.

    Attributes:
        param: of the parameters between uses, a prefix of `master`.
        grad: of the accumulators; that of `master`, or replicated.
        master: of masters and optimizer states.
        second: of a second copy of the parameters, a prefix of `param`; None without one.
        partial: axes over which the gradients of one rank are partial sums. Ranks along them have equal parameters;
            along other data axes each has parameters of its own.
        each_sum: the part of `partial` that every bucket is summed over.
        last_sum: the part of `partial` that accumulators are summed over, once in a step.
        copies: groups of ranks along other axes that have copies.
        compute: dtype of parameters.
        full: dtype of masters and optimizer states in an update, and at rest without codes.
        accumulate: dtype of accumulated gradients.
        wire: dtype of gradients in messages.
        master_is_param: masters are (a slice of) the parameters and have no memory of their own.
        codes: in which masters and optimizer states rest between updates.
        is_coded: shards of parameters rest as 8-bit codes, and are gathered so.
        slots: names of the optimizer's states, where units differ in them; None: all that the optimizer has.
        differs_over_data: ranks of the data axis may have parameters of their own; follows from `partial`.
    """

    param: Placement = REPLICATED
    grad: Placement = REPLICATED
    master: Placement = REPLICATED
    second: Placement | None = None
    partial: tuple[str, ...] = DATA_AXES
    each_sum: tuple[str, ...] = DATA_AXES
    last_sum: tuple[str, ...] = ()
    copies: tuple[Copies, ...] = ()
    compute: torch.dtype = torch.float32
    full: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    master_is_param: bool = False
    codes: StateCodes = PLAIN
    is_coded: bool = False
    slots: tuple[str, ...] | None = None
    differs_over_data: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "differs_over_data", self.partial != DATA_AXES)

    def slots_among(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of the optimizer's states that the unit has."""
        return tuple(name for name in names if self.slots is None or name in self.slots)

    @classmethod
    def of(
        cls,
        topology: Topology,
        *,
        grad: Placement,
        master: Placement,
        partial: tuple[str, ...] = DATA_AXES,
        **more: Any,
    ) -> UnitStates:
        """States whose sums follow from the placements; `more`: the other attributes.

        Gradients sharded over a part of `partial` are summed in two hops (MiCS, arXiv 2205.00119).
        """
        cut = topology.resolve(master.axes)
        rest = tuple(axis for axis in topology.resolve(partial) if axis not in cut)
        if grad.is_replicated or topology.group_size(rest) == 1:
            return cls(grad=grad, master=master, partial=partial, each_sum=partial, **more)
        return cls(grad=grad, master=master, partial=partial, each_sum=master.axes, last_sum=rest, **more)
