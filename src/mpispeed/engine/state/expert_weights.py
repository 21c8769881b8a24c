"""Loading of the weights of experts on several ranks from a state dict that has all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.state.global_layout import GlobalLayout
    from mpispeed.mesh.comm import Failures


def with_all_experts(layout: GlobalLayout, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict of this rank's parameters, with tensors without data for what is of experts on other ranks."""
    if not layout.experts.are_shared_out:
        return own

    def like(_: str, value: Any) -> Any:
        return torch.empty(value.shape, device="meta") if isinstance(value, torch.Tensor) else value

    found = dict(layout.expanded(own.items(), like))
    for name in layout.experts.fused.keys() & found.keys():
        found[name] = torch.empty(layout.whole_shape(name, tuple(found[name].shape)), device="meta")
    return found


def take_experts(
    parts: Parts, layout: GlobalLayout, own: Mapping[str, Any], given: Mapping[str, Any], failures: Failures
) -> None:
    """Load experts from data rank 0, one tensor at a time; each rank takes those that it has.

    Args:
        parts: components of the engine.
        layout: this rank's part in the whole model.
        own: this rank's parameters by name.
        given: tensors of the whole model by name, on data rank 0; other values are left alone.
        failures: takes what goes wrong with this rank's parameters.

    Collective over: the data axis.
    """
    comm = parts.mesh["data"]
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    dtypes = {name: (_wide(value.dtype), value.numel()) for name, value in tensors.items()}
    for name, (dtype, numel) in comm.share(dtypes).items():
        flat = torch.zeros(numel, dtype=dtype)
        with failures.kept():
            if comm.rank == 0:
                flat.copy_(given[name].detach().reshape(-1))
        comm.broadcast(flat)
        with failures.kept():
            if name in own:
                before = layout.before(name)
                _store(parts, own[name], flat[before : before + _numel(parts, own[name])])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype that has all values of `dtype` and that ranks can pass to each other."""
    return dtype if dtype.itemsize >= 4 or not dtype.is_floating_point else torch.float32


def _numel(parts: Parts, tensor: torch.Tensor) -> int:
    place = parts.table.locate(tensor)
    return math.prod(tensor.shape if place is None else place.entry.shape)


def _store(parts: Parts, param: torch.Tensor, values: torch.Tensor) -> None:
    """Set this rank's part of a parameter, from the values of all of it. Shapes: values [numel]."""
    place, shards = parts.table.locate(param), parts.params.shards
    if place is None:
        param.data.copy_(values.view(param.shape))
        return
    unit, entry = place.unit, place.entry
    span, target = shards.span(unit), shards.master(unit)
    if not unit.is_trainable:
        span, target = shards.rest_span(unit), shards.rest(unit)
    common = entry.span.intersect(span)
    if common.numel:
        target[common.shifted(-span.start).slice].copy_(values[common.shifted(-entry.offset).slice])
    (shards.put_master if unit.is_trainable else shards.put_rest)(unit, target)
