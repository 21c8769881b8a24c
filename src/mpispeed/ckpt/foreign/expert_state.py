"""Optimizer state of DeepSpeed's mixtures that is not cut: a file for each expert-parallel rank, without names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.experts import Experts
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch
from mpispeed.ckpt.foreign.found import Found
from mpispeed.ckpt.foreign.matching import plain_group
from mpispeed.ckpt.foreign.undivided import take_undivided

_INNER, _MASTERS = "optimizer_state_dict", ("fp32_groups", "fp32_groups_flat")


def take(found: Found, experts: Experts, paths: Mapping[int, Path]) -> None:
    """Add the states of all expert-parallel ranks.

    A rank numbers the parameters that it has. Groups that are marked as of experts have those of the rank's experts in
    the order of the model, other groups the rest; without marks a group has both.

    Args:
        found: has all parameters, in the order of the model.
        experts: layers of experts.
        paths: files by rank.

    Raises:
        ForeignIncomplete: there is no file.
        ForeignMismatch: numbers cannot be matched with names.
        ForeignCorrupt: a file is damaged.
    """
    if not paths:
        msg = f"{found.path} has no expp_rank_*_optim_states.pt with optimizer state of experts; files are missing"
        raise ForeignIncomplete(msg)
    optimizers = [_read(paths[rank]) for rank in sorted(paths)]
    groups = [_groups(optimizer, paths[rank]) for rank, optimizer in enumerate(optimizers)]
    marked = [index for index, group in enumerate(groups[0]) if group.get("moe")]
    names = {str(groups[0][index].get("name")) for index in marked}
    if len({len(own) for own in groups}) > 1 or len(names) > 1:
        msg = (
            f"{found.path}: groups of experts are named {', '.join(sorted(names))}, and ranks have "
            f"{[len(own) for own in groups]!r:.80} groups; only layers of one ep_size can be matched with optimizer "
            "state that is not cut. Import with --weights-only"
        )
        raise ForeignMismatch(msg)
    for rank, optimizer in enumerate(optimizers):
        own = _of_rank(found, experts, rank, len(optimizers))
        others = [name for name in found.params if not experts.has(name)]
        if marked:
            rest = [index for index in range(len(groups[0])) if index not in marked]
            if rank == 0:  # the others have copies
                _take_groups(found, others, optimizer, rest)
            _take_groups(found, [name for name in found.params if name in own], optimizer, marked)
        else:
            both = own | set(others)
            _take_groups(found, [name for name in found.params if name in both], optimizer, range(len(groups[0])))
    found.groups = [plain_group(group) for group in groups[0]]
    found.rule = found.rule or "Adam"


def _read(path: Path) -> Mapping[str, Any]:
    content = torch_files.read(path)
    state = content.get("optimizer") if isinstance(content, Mapping) else None
    if not isinstance(state, Mapping):
        msg = f"{path} holds no state of an optimizer"
        raise ForeignCorrupt(msg)
    return state


def _groups(optimizer: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    inner = optimizer.get(_INNER, optimizer)
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    if not isinstance(groups, list) or not groups or not all(isinstance(group, Mapping) for group in groups):
        msg = f"{path}: the optimizer state has no parameter groups; it has {', '.join(map(str, optimizer))!s:.200}"
        raise ForeignMismatch(msg)
    return groups


def _of_rank(found: Found, experts: Experts, rank: int, ranks: int) -> set[str]:
    """Names of the parameters of the experts that a rank has."""
    names = set()
    for layer in experts.layers:
        held = layer.held(ranks)
        if layer.is_fused and ranks > 1:
            msg = f"{found.path}: optimizer state of slices of {layer.prefix}*; import with --weights-only"
            raise ForeignMismatch(msg)
        for name, _, _, expert in layer.weights():
            if layer.is_fused or rank * held <= expert[0] < (rank + 1) * held:
                names.add(name)
    return names & found.params.keys()


def _take_groups(found: Found, names: Sequence[str], optimizer: Mapping[str, Any], which: Sequence[int]) -> None:
    """Match some groups with some parameters."""
    if not which:
        return
    part = Found(found.path, found.form, {name: found.params[name] for name in names})
    take_undivided(part, _restricted(optimizer, which))
    for param in part.params.values():
        if param.group >= 0:
            param.group = which[param.group]
    found.counters |= part.counters


def _restricted(optimizer: Mapping[str, Any], which: Sequence[int]) -> dict[str, Any]:
    if _INNER in optimizer:
        masters = {key: [optimizer[key][index] for index in which] for key in _MASTERS if key in optimizer}
        return {**optimizer, **masters, _INNER: _restricted(optimizer[_INNER], which)}
    groups = [optimizer["param_groups"][index] for index in which]
    states = optimizer["state"]
    kept = {key: states[key] for group in groups for key in group["params"] if key in states}
    return {**optimizer, "param_groups": groups, "state": kept}
