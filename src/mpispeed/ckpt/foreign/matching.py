"""Matching of optimizer state, which numbers its parameters, with names of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.found import MASTER, Found, FoundParam
from mpispeed.ckpt.foreign.values import Plain

Group = Mapping[str, Any]


def number(value: Any) -> float | int | bool | None:
    """A number, also from a tensor of one element; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, (bool, int, float)) else None


def take_optimizer(
    found: Found, optimizer: Mapping[str, Any], masters: Sequence[Sequence[torch.Tensor]] | None = None
) -> None:
    """Add a state dict of a torch optimizer: states by number, groups with lists of numbers.

    Groups that list names are matched by these. Otherwise parameters of a group are assumed to be in the order of the
    model and are matched by shape; ambiguous ones are refused.

    Args:
        found: has the parameters already.
        optimizer: "state" and "param_groups".
        masters: fp32 copies in the order of the groups, where the optimizer had some.

    Raises:
        ForeignMismatch: numbers and names cannot be matched.
    """
    groups, states = optimizer["param_groups"], optimizer["state"]
    ids = [list(group["params"]) for group in groups]
    shapes: dict[Any, tuple[int, ...]] = {}
    for key, state in states.items():
        shape = _shape_of(state)
        if shape is not None:
            shapes[key] = shape
    for group_ids, own in zip(ids, masters or (), strict=masters is not None):
        shapes.update({key: tuple(tensor.shape) for key, tensor in zip(group_ids, own, strict=True)})
    names = _named(groups, ids) or _matched(found, ids, shapes)
    found.groups = [plain_group(group) for group in groups]
    for index, group_ids in enumerate(ids):
        for place, key in enumerate(group_ids):
            param = found.params.get(names[key])
            if param is None:
                msg = f"{found.path}: the optimizer names {names[key]!r}, which is no parameter"
                raise ForeignMismatch(msg)
            param.group = index
            if masters is not None:
                param.slots = {MASTER: Plain(masters[index][place])}
            take_states(param, states.get(key, {}), groups[index])
    for param in found.params.values():
        param.is_frozen = param.group < 0


def plain_group(group: Group) -> dict[str, Any]:
    """The hyper-parameters of a group that are plain values."""
    return {
        key: value for key, value in group.items() if key not in ("params", "param_names", "step") and _is_plain(value)
    }


def take_states(param: FoundParam, state: Mapping[str, Any], group: Group) -> None:
    """Add the state of one parameter: tensors of its shape as slots, and the number of updates.

    Raises:
        ForeignMismatch: a tensor has another shape.
    """
    step = number(state.get("step", group.get("step")))
    if step is not None:
        param.step = int(step)
    for slot, value in state.items():
        if slot == "step" or not isinstance(value, torch.Tensor):
            continue
        if value.numel() == param.numel and (value.numel() != 1 or tuple(value.shape) == param.shape):
            param.slots[slot] = Plain(value)
        elif value.numel() != 1:
            msg = (
                f"the optimizer state {slot!r} of {param.name!r} has shape {tuple(value.shape)}, the parameter "
                f"{param.shape}; only state of one value per element can be imported, see --weights-only"
            )
            raise ForeignMismatch(msg)


def _shape_of(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of the tensors of a state besides its counters."""
    shapes = [tuple(v.shape) for key, v in state.items() if isinstance(v, torch.Tensor) and key != "step"]
    return max(shapes, key=len) if shapes else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _named(groups: Sequence[Group], ids: Sequence[Sequence[Any]]) -> dict[Any, str]:
    if not all(len(group.get("param_names") or ()) == len(own) for group, own in zip(groups, ids, strict=True)):
        return {}
    return {
        key: name
        for group, own in zip(groups, ids, strict=True)
        for key, name in zip(own, group.get("param_names") or (), strict=True)
    }


def _matched(found: Found, ids: Sequence[Sequence[Any]], shapes: Mapping[Any, tuple[int, ...]]) -> dict[Any, str]:
    """Number -> name, matched by shape; the match of each shape has to be unique."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, param in found.params.items():
        if not param.is_frozen:
            by_shape.setdefault(param.shape, []).append(name)
    every = [key for own in ids for key in own]
    unknown = [key for key in every if key not in shapes]
    if unknown and (len(ids) > 1 or len(every) != sum(map(len, by_shape.values()))):
        msg = (
            f"{found.path}: {len(unknown)} parameters of the optimizer have no state that would show their shape; "
            "import with --weights-only"
        )
        raise ForeignMismatch(msg)
    if unknown:
        names = [name for name, param in found.params.items() if not param.is_frozen]
        return dict(zip(every, names, strict=True))
    matched: dict[Any, str] = {}
    for shape in {shapes[key] for key in every}:
        groups = [[key for key in own if shapes[key] == shape] for own in ids]
        wanted = [key for own in groups for key in own]
        names = by_shape.get(shape, [])
        is_clear = len(wanted) == len(names) and (len(names) == 1 or sum(map(bool, groups)) == 1)
        if not is_clear:
            msg = (
                f"{found.path}: the optimizer has state of {len(wanted)} parameters of shape {shape} in "
                f"{sum(map(bool, groups))} groups, the model has {', '.join(names) or 'none'}; which is which is not "
                "written there. Name the parameters that are not trained with --frozen, or import with --weights-only"
            )
            raise ForeignMismatch(msg)
        matched.update(zip(wanted, names, strict=True))
    return matched
