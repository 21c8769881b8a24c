"""Units of a model under a plan: parameters that are gathered, reduced and updated together, and their replication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpispeed.nn.tensor import cuts, partial_gradients
from mpispeed.pipe.module import PipelineModule
from mpispeed.sharding.units import plan_units

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.plan.plan import Plan
    from mpispeed.store.layout import Table


def deal_units(plan: Plan, model: nn.Module, group_of: Mapping[int, int]) -> Table:
    """The units of a model under a plan; `group_of` is as for `sharding.units.plan_units`."""
    zero, topology = plan.config.zero_optimization, plan.topology()
    return plan_units(
        model,
        group_of,
        topology.group_size("data"),
        plan.bucket_elements,
        merge_elements=zero.param_persistence_threshold,
        takes_frozen=not plan.states.param.is_replicated,
        kind_of=kinds_of(model, topology.group_size("model")),
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """Replication of the parameters of a unit.

    Attributes:
        tie: key of the tied module, "" for none.
        along_model: "" for slices, "copied" for the same weight and gradient on all ranks of the model axis, "partial"
            for the same weight of which each rank has a part of the gradient.
    """

    tie: str = ""
    along_model: str = ""


def kinds_of(model: nn.Module, slices: int) -> dict[int, Kind]:
    """Kind by `id` of the parameter, for replicated parameters; `slices` is the size of the model axis."""
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
