"""Parameters that ranks of the pipe or the model axis have in common: which they are, and what that asks of a step.

A weight that is tied over stages, or that every slice of a layer has whole, is one parameter with several copies. Its
gradients are summed where copies saw different things, it counts once in the norm, and one rank writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpispeed.nn.tensor import cuts, partial_gradients
from mpispeed.pipe.module import PipelineModule
from mpispeed.pipe.tied import make_equal

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.table import Unit
    from mpispeed.zero.grads import GradStore


@dataclass(frozen=True, slots=True)
class Kind:
    """What the parameters of a unit have in common.

    Attributes:
        tie: key of the tied module, "" for none.
        along_model: "" where slices differ, "copied" where all have the same weight and the same gradient, "partial"
            where they have the same weight and each a part of its gradient.
    """

    tie: str = ""
    along_model: str = ""


def kinds_of(model: nn.Module, slices: int) -> dict[int, Kind]:
    """Kind by `id` of the parameter, of those that are shared at all; `slices` is the size of the model axis."""
    ties: dict[int, str] = {}
    if isinstance(model, PipelineModule) and model.num_stages > 1:
        for key in model.tied_keys():
            tied = model.tied(key)
            if len(tied.stages) > 1:
                ties.update((id(param), key) for _, param in tied.params)
    cut = {name for name, found in cuts(model).items() if found.kind != "replicated"} if slices > 1 else set[str]()
    partial = set(partial_gradients(model)) if slices > 1 else set[str]()
    found: dict[int, Kind] = {}
    for name, param in model.named_parameters():
        along = "" if slices == 1 or name in cut else "partial" if name in partial else "copied"
        kind = Kind(ties.get(id(param), ""), along)
        if kind != Kind():
            found[id(param)] = kind
    return found


@dataclass(slots=True)
class Sharing:
    """The groups of ranks behind the kinds.

    Attributes:
        model: the slices of a layer; None where layers are whole.
        is_first_slice: this rank counts and writes what all slices have.
        ties: the stages that share a tied module, by key.
    """

    model: Comm | None = None
    is_first_slice: bool = True
    ties: Mapping[str, Comm] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, model: nn.Module) -> Sharing:
        """The groups of a mesh and of a pipeline's tied weights."""
        ties: dict[str, Comm] = {}
        if isinstance(model, PipelineModule):
            found = {key: model.tied(key).group for key in model.tied_keys()}
            ties = {key: group for key, group in found.items() if group is not None}
        slices = mesh["model"]
        return cls(slices if slices.size > 1 else None, slices.rank == 0, ties)

    def is_counted(self, unit: Unit) -> bool:
        """True on the one rank of those that share the unit which counts it in the norm, and writes it."""
        kind = unit.kind
        if not isinstance(kind, Kind):
            return True
        is_first_tie = not kind.tie or kind.tie not in self.ties or self.ties[kind.tie].rank == 0
        return is_first_tie and (self.is_first_slice or not kind.along_model)

    def sum(self, grads: GradStore) -> None:
        """Add up this rank's range of the summed gradients, over slices and over stages.

        Collective over: the ranks that share a unit.
        """
        for unit in grads.table.units:
            for comm in self._summed_over(unit):
                values = grads.reduced(unit)
                comm.all_reduce(values)
                grads.put_reduced(unit, values)

    def find_unlike(self, model: nn.Module, kinds: Mapping[int, Kind], group_of: Mapping[int, int]) -> str:
        """A sentence if stages train a tied weight in different groups, or not all train it; else "".

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
                if kinds.get(id(param), Kind()).tie == key
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
        """Give all copies of shared parameters the values of the first rank that has them.

        Collective over: the ranks that share a parameter.
        """
        for param in params:
            kind = kinds.get(id(param), Kind())
            if kind.along_model and self.model is not None:
                make_equal([param], self.model)
            if kind.tie and kind.tie in self.ties:
                make_equal([param], self.ties[kind.tie])

    def _summed_over(self, unit: Unit) -> list[Comm]:
        kind = unit.kind
        if not isinstance(kind, Kind):
            return []
        found = [self.model] if kind.along_model == "partial" and self.model is not None else []
        return found + ([self.ties[kind.tie]] if kind.tie in self.ties else [])
