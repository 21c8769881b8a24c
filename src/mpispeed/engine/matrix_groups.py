"""Parameter groups of an optimizer that updates matrices as wholes: those of matrices apart from the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.optim.muon import USE, is_named_hidden
from mpispeed.optim.rule import Matrixwise, Rule

if TYPE_CHECKING:
    from torch import Tensor

Groups = list[dict[str, Any]]


def split_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]], rule: Matrixwise) -> Groups:
    """Each group as two, of matrices and of the others, in this order; a group with `use_muon` stays one.

    Args:
        model: has the names of the parameters.
        groups: with parameters, and the hyper-parameters that the caller has given.
        rule: fills in the rest.

    Raises:
        ConfigError: a vector is asked to be a matrix.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    tables = {
        id(param) for module in model.modules() if isinstance(module, _TABLES) for param in module.parameters(False)
    }
    found: Groups = []
    for group in groups:
        if USE in group:
            is_matrix = bool(group[USE])
            for param in group["params"] if is_matrix else ():
                _require_matrix(names.get(id(param), "?"), param)
            found.append({**rule.group_of(group, is_matrix=is_matrix), "params": list(group["params"])})
            continue
        sorts: dict[bool, list[Tensor]] = {True: [], False: []}
        for param in group["params"]:
            sorts[_is_matrix(names.get(id(param), ""), param, tables)].append(param)
        found += [{**rule.group_of(group, is_matrix=kind), "params": params} for kind, params in sorts.items()]
    return found


_TABLES = (nn.Embedding, nn.EmbeddingBag)


def _is_matrix(name: str, param: Tensor, tables: set[int]) -> bool:
    """As DeepSpeed decides, by dims and name, but for tables of embeddings, which no name gives away for certain."""
    wanted = getattr(param, USE, None)
    if wanted is None:
        return param.dim() >= 2 and is_named_hidden(name) and id(param) not in tables
    if wanted:
        _require_matrix(name, param)
    return bool(wanted)


def _require_matrix(name: str, param: Tensor) -> None:
    if param.dim() < 2:
        msg = (
            f"parameter {name!r} of shape {tuple(param.shape)} has use_muon true, and Muon updates matrices: "
            "parameters of at least two dims; leave it to Adam with use_muon false"
        )
        raise ConfigError(msg)


def slots_apart(rule: Rule | None, groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Names of the optimizer's states by `id` of the parameter, where parameters differ in them; else nothing."""
    if not isinstance(rule, Matrixwise):
        return {}
    return {id(param): rule.slots_of(group) for group in groups for param in group["params"]}


def groups_of(model: nn.Module, rule: Rule | None) -> Groups:
    """The groups of all trained parameters of a model, for a prediction."""
    if not isinstance(rule, Matrixwise):
        return []
    return split_groups(model, [{"params": [param for param in model.parameters() if param.requires_grad]}], rule)
