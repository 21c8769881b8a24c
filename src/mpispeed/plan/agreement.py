"""Comparison of plans and models between ranks; the first difference is named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.mesh import Topology
from mpispeed.nn.expert import ExpertModules, RoutedExperts, Router
from mpispeed.nn.tensor import cuts
from mpispeed.nn.tensor.tensor_cut import marks_of
from mpispeed.plan.own_slices import asks_for_slices

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.comm import Comm
    from mpispeed.plan.plan import Plan

_SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)
_LONGEST = 120


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """Short hashes of one rank's plan and model; models have to be equal on ranks with the same `place`."""

    plan: str
    place: tuple[int, int]
    model: str


def fingerprint(plan: Plan, rank: int, model: nn.Module) -> Fingerprint:
    """Hashes of a plan and a model, small enough to be compared at every start.

    A place is a stage, and an index on the model axis where the model sliced its layers itself.
    """
    coords = Topology(plan.axes).coords(rank)
    place = coords["pipe"], 0 if cuts(model) or asks_for_slices(plan.config) else coords["model"]
    text = repr((plan.policy, _parameters(model), list(_router_options(model))))
    return Fingerprint(plan.digest(), place, hashlib.sha256(text.encode()).hexdigest()[:16])


def require_equal(comm: Comm, found: Sequence[Fingerprint], plan: Plan, model: nn.Module) -> None:
    """Refuse plans and models that differ between ranks; the message names the first difference and both values.

    Collective over: all ranks, with equal `found`.

    Raises:
        ConfigError: on every rank.
    """
    first: dict[tuple[int, int], int] = {}
    others = [
        0 if mine.plan != found[0].plan else first.setdefault(mine.place, rank) for rank, mine in enumerate(found)
    ]
    odd = [
        rank for rank, mine in enumerate(found) if mine.plan != found[0].plan or mine.model != found[others[rank]].model
    ]
    if not odd:
        return
    pair = odd[0], others[odd[0]]
    told = comm.gather_objects(dict(_facts(plan, model)) if comm.rank in pair else None)
    what = _name_differences(told[pair[0]], told[pair[1]], *pair)
    msg = f"ranks {odd[:8]} have another plan than rank {pair[1]}: {what}; build config and model from equal values "
    raise ConfigError(msg + "everywhere")


def _parameters(model: nn.Module) -> list[tuple[str, tuple[int, ...], Any]]:
    """Names, shapes before layers are sliced, and dtypes; of experts those that all ranks have."""
    whole, common = cuts(model), _common_experts(model)
    return [
        (name, tuple(common.get(name) or (whole[name].shape if name in whole else param.shape)), param.dtype)
        for name, param in model.named_parameters()
        if common.get(name, (1,)) != ()
    ]


def _router_options(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and values of the options of routers: ranks with others would train another model."""
    for path, module in model.named_modules():
        if isinstance(module, Router):
            for field in dataclasses.fields(module.options):
                yield f"{field.name} of the router {path}", repr(getattr(module.options, field.name))


def _common_experts(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes without the expert that ranks have more than others, where they do not divide; () for its parameters.

    A model that was in an engine has its rank's experts.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts):
            continue
        least = layer.experts.num_experts // layer.ep_size
        start = f"{path}.{layer.experts_name}." if path else f"{layer.experts_name}."
        if not layer.experts.num_experts % layer.ep_size or len(layer.experts.held) != least + 1:
            continue
        for name, param in layer.experts.named_parameters():
            if not isinstance(layer.experts, ExpertModules):
                whole = marks_of(layer.experts).cuts.get(name)
                found[start + name] = (least, *(whole.shape if whole else param.shape)[1:])
            elif int(name[len(layer.experts.prefix) :].partition(".")[0]) - layer.experts.held.start == least:
                found[start + name] = ()
    return found


def _facts(plan: Plan, model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and values of everything in the hashes, the config first."""
    yield from _leaves("", json.loads(plan.config.model_dump_json()))
    for name, shape, dtype in _parameters(model):
        yield f"the parameter {name}", f"{shape} {str(dtype).removeprefix('torch.')}"
    yield from _router_options(model)
    for name in ("axes", "batch", "placing", "policy"):
        yield f"the plan's {name}", repr(getattr(plan, name))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, each)
    else:
        yield path, json.dumps(value)


def _name_differences(odd: Mapping[str, str], first: Mapping[str, str], odd_rank: int, first_rank: int) -> str:
    names = [name for name in dict.fromkeys([*first, *odd]) if odd.get(name) != first.get(name)]
    if not names:
        return "the order of the model's parameters differs"

    def shown(facts: Mapping[str, str]) -> str:
        text = facts.get(names[0], "not there")
        return "another one" if _SECRET.search(names[0]) else text if len(text) <= _LONGEST else text[:_LONGEST] + "..."

    more = f" ({len(names) - 1} more differ)" if len(names) > 1 else ""
    return f"{names[0]} is {shown(odd)} on rank {odd_rank} and {shown(first)} on rank {first_rank}{more}"
