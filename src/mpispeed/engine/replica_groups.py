"""Parameters shared along the pipe or the model axis: their gradient sums, norm and checkpoint.

A weight tied over stages, or replicated on every slice of a layer, is one parameter with several copies. Its gradients
are summed where copies saw different data, it counts once in the norm, and one rank writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpispeed.nn.tensor import cuts
from mpispeed.nn.tensor.tensor_cut import OWN
from mpispeed.pipe.module import PipelineModule
from mpispeed.pipe.tied import make_equal
from mpispeed.plan.units import PLAIN, Kind
from mpispeed.sharding.sharded_init import edited

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.sharding.grads import GradStore
    from mpispeed.store.layout import Unit
    from mpispeed.store.unit_states import Copies


@dataclass(slots=True)
class Sharing:
    """Groups of ranks that share parameters.

    Attributes:
        slices: ranks with slices of the same layers; this rank alone where layers are not sliced.
        ties: the stages that share a tied module, by key.
        is_own_cut: the model sliced its layers itself; replicated parameters were compared already.
    """

    slices: Comm
    ties: Mapping[str, Comm] = field(default_factory=dict)
    is_own_cut: bool = False

    @classmethod
    def of(cls, mesh: Mesh, model: nn.Module) -> Sharing:
        """The groups of a mesh and of a pipeline's tied weights."""
        ties: dict[str, Comm] = {}
        if isinstance(model, PipelineModule):
            found = {key: model.tied(key).group for key in model.tied_keys()}
            ties = {key: group for key, group in found.items() if group is not None}
        is_own_cut = any(cut.kind == OWN for cut in cuts(model).values())
        return cls(mesh["model"], ties, is_own_cut)

    @property
    def shares(self) -> bool:
        """True if there is anything to share."""
        return self.slices.size > 1 or bool(self.ties)

    def is_counted(self, unit: Unit) -> bool:
        """True on the rank that counts the unit in the norm and writes it, one of those that share it."""
        return all(self.ranks_of(copies).rank == 0 for copies in unit.states.copies)

    def sum(self, grads: GradStore) -> None:
        """Add up this rank's range of the summed gradients, over slices and over stages.

        Collective over: the ranks that share a unit.
        """
        for unit in grads.table.units:
            for comm in self.summed_over(unit):
                values = grads.shards.reduced(unit)
                comm.all_reduce(values)
                grads.shards.put_reduced(unit, values)

    def find_unlike(self, model: nn.Module, kinds: Mapping[int, Kind], group_of: Mapping[int, int]) -> str:
        """A sentence if stages have a tied weight in different parameter groups, or frozen on one only; else "".

        Collective over: the stages that share a weight.

        Args:
            model: the stage.
            kinds: as `kinds_of`.
            group_of: parameter group index by `id` of the parameter; the others are frozen.
        """
        problem = ""
        for key, comm in self.ties.items():
            own = [
                (name, group_of.get(id(param), -1))
                for name, param in model.named_parameters()
                if any(copies.key == key for copies in kinds.get(id(param), PLAIN).copies)
            ]
            for other in comm.gather_objects(own):
                odd = [name for (name, group), (_, theirs) in zip(own, other, strict=True) if group != theirs]
                if odd:
                    problem = (
                        f"tied weights {', '.join(odd)} are frozen on one of their stages and not on another, or are "
                        "in different parameter groups; treat them alike on all stages"
                    )
        return problem

    def equalise(self, params: Sequence[nn.Parameter], kinds: Mapping[int, Kind]) -> None:
        """Copy the values of shared parameters from the first rank that has them to the others.

        Collective over: the ranks that share a parameter, and those over which `zero.Init` has sharded it.
        """
        for param in params:
            copies = kinds.get(id(param), PLAIN).copies
            groups = [self.ranks_of(each) for each in copies if each.key or not self.is_own_cut]
            with edited(param) if groups else nullcontext():
                for group in groups:
                    make_equal([param], group)

    def summed_over(self, unit: Unit) -> list[Comm]:
        """Groups of ranks with copies of the unit that saw different data: their gradients add up."""
        return [self.ranks_of(copies) for copies in unit.states.copies if copies.is_partial]

    def ranks_of(self, copies: Copies) -> Comm:
        """The ranks of a group of copies."""
        return self.ties[copies.key] if copies.key else self.slices
