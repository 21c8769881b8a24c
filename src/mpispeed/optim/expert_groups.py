"""Groups of parameters in which experts are apart from the rest, as optimizers of mixtures need them.

A parameter of an expert carries `allreduce = False`, and `group_name` is the name of its expert-parallel group, as
"ep_size_4"; gradients of groups with different names are summed over different ranks.

Source: DeepSpeed 0.16, `deepspeed.moe.utils`. Other than there, the groups of the caller are not changed, groups come
in an order that is the same on all ranks (that of their first parameters), and no empty groups of experts are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

MAX_GROUP_SIZE = 178956971
"""Elements. The longest group of experts unless the caller says otherwise; DeepSpeed's number."""

Group = dict[str, Any]


def is_moe_param(param: Tensor) -> bool:
    """True for a parameter of an expert."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """True for a group that holds experts."""
    return bool(param_group.get("moe", False))


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Whether there is a layer of experts in `module`, and how many experts the first one has, or 0.

    A layer of experts is known by its `num_experts` and `expert_group_name`.
    """
    for layer in module.modules():
        count: Any = getattr(layer, "num_experts", None)
        if count is not None and hasattr(layer, "expert_group_name"):
            return True, int(count)
    return False, 0


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters of no expert, parameters of experts), each in the order given."""
    shared: list[Tensor] = []
    experts: list[Tensor] = []
    for param in params:
        (experts if is_moe_param(param) else shared).append(param)
    return shared, experts


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of both kinds, in the dtypes of their parameters; parameters without one are left out."""
    shared, experts = split_params_into_shared_and_expert_params(param for param in group if param.grad is not None)
    return _grads(shared), _grads(experts)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = MAX_GROUP_SIZE
) -> list[Group]:
    """The groups without their experts, then one group for the experts of each group and expert-parallel group.

    A group of experts has the options of the group that they come from, the name of their expert-parallel group, and
    `moe` set. A group whose parameters are all experts stays, without parameters.

    Args:
        param_groups: a group, or a list or tuple of groups; each has a "name". They are not changed.
        max_group_size: elements; groups of experts that have more are cut between parameters, a longer parameter is a
            group by itself. None: nothing is cut.

    Raises:
        ValueError: `param_groups` is none of these, or `max_group_size` is below 1.
        TypeError: one of the groups is no dict.
        KeyError: a group has no name or no parameters, or an expert no `group_name`.
    """
    if max_group_size is not None and max_group_size < 1:
        msg = f"max_group_size is {max_group_size}; pass a number of elements, 1 or more, or None for no limit"
        raise ValueError(msg)
    groups = [_checked(group, at) for at, group in enumerate(_as_list(param_groups))]
    dense: list[Group] = []
    experts: list[Group] = []
    for group in groups:
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        dense.append({**group, "params": shared})
        for name, params in _by_name(own).items():
            pieces = _cut(params, max_group_size)
            experts += [{**group, "name": name, "moe": True, "params": piece} for piece in pieces]
    return dense + experts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Group]:
    """Groups for an optimizer, out of a list of parameters or of groups.

    Parameters become one group "dense-params" and its groups of experts. Groups are split, unless one of them has the
    key "moe": then all are returned as they are.

    Raises:
        TypeError: the list holds something else than tensors, or something else than dicts.
        KeyError: a group has no name or no parameters.
    """
    if not isinstance(model_parameters, list):
        msg = f"model_parameters is a {type(model_parameters).__name__}; pass a list of parameters or of groups"
        raise TypeError(msg)
    if all(isinstance(each, dict) for each in model_parameters):
        if any("moe" in group for group in model_parameters):
            return model_parameters
        return split_params_into_different_moe_groups_for_optimizer(model_parameters)
    for at, each in enumerate(model_parameters):
        if not isinstance(each, Tensor):
            msg = (
                f"model_parameters[{at}] is a {type(each).__name__}; pass a list of tensors only, or of dicts only, "
                "as torch's optimizers take them"
            )
            raise TypeError(msg)
    group = {"params": model_parameters, "name": "dense-params"}
    return split_params_into_different_moe_groups_for_optimizer(group)


def _grads(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad.to(param.dtype) for param in params if param.grad is not None]


def _as_list(param_groups: object) -> list[Any]:
    if isinstance(param_groups, Mapping):
        return [param_groups]
    if isinstance(param_groups, (list, tuple)):
        return list(param_groups)
    msg = f"param_groups is a {type(param_groups).__name__}; pass a dict, or a list or tuple of dicts"
    raise ValueError(msg)


def _checked(group: Any, at: int) -> Group:
    """A copy of a group, with its parameters in a list."""
    if not isinstance(group, Mapping):
        msg = f"param_groups[{at}] is a {type(group).__name__}; pass a dict with 'name' and 'params'"
        raise TypeError(msg)
    for key in ("name", "params"):
        if key not in group:
            msg = f"param_groups[{at}] has no '{key}'; it has {', '.join(map(repr, group)) or 'nothing'}"
            raise KeyError(msg)
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _by_name(experts: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Experts by the names of their groups, in the order in which the names come first."""
    found: dict[str, list[Tensor]] = {}
    for param in experts:
        name = getattr(param, "group_name", None)
        if name is None:
            msg = (
                f"a parameter of shape {tuple(param.shape)} has allreduce = False, as parameters of experts have, but "
                "no group_name; set it to the name of its expert-parallel group"
            )
            raise KeyError(msg)
        found.setdefault(name, []).append(param)
    return found


def _cut(params: Iterable[Tensor], most: int | None) -> Iterator[list[Tensor]]:
    """Parameters in order, in pieces of at most `most` elements."""
    piece: list[Tensor] = []
    size = 0
    for param in params:
        if piece and most is not None and size + param.numel() > most:
            yield piece
            piece, size = [], 0
        piece.append(param)
        size += param.numel()
    if piece:
        yield piece
