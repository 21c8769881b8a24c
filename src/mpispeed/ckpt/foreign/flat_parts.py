"""Parameters from flat fp32 shards of data ranks, which shard whole groups (stages 1, 2) or each parameter (3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.matching import number, plain_group
from mpispeed.ckpt.foreign.values import Values, placed

Shapes = Mapping[str, tuple[int, ...]]
#: name, shape, parameter group, updates (None: not written), slots
Cut = tuple[str, tuple[int, ...], int, int | None, dict[str, Values]]
#: ranks over which a group is cut, and what turns names of rank 0 into those of the parameters that these ranks have
Share = tuple[Sequence[int], Callable[[str], str]]


def cut_by_group(
    folder: Path, shapes: Sequence[Shapes], optimizers: Sequence[Mapping[str, Any]], shares: Sequence[Sequence[Share]]
) -> tuple[Iterator[Cut], list[dict[str, Any]]]:
    """Stages 1 and 2: each group is one flat tensor, padded and evenly sharded; padding of the end may be missing.

    Args:
        folder: folder of the tag.
        shapes: of each group, by the names that rank 0 has.
        optimizers: state of each rank.
        shares: of each group; several where ranks have different experts.

    Raises:
        ForeignMismatch: sizes do not fit.
    """
    masters = [own["single_partition_of_fp32_groups"] for own in optimizers]
    if any(len(own) != len(shapes) for own in masters):
        counts = sorted({len(own) for own in masters})
        msg = f"{folder}: {len(shapes)} lists of shapes, and flat parts of {counts} parameter groups"
        raise ForeignMismatch(msg)
    states, groups = _states_by_group(optimizers, len(shapes))
    for index, own in enumerate(shapes):
        for ranks, _ in shares[index]:
            _check_sum(folder, index, own, [masters[rank][index].numel() for rank in ranks])
    made = (
        cut
        for index, own in enumerate(shapes)
        for ranks, rename in shares[index]
        for cut in _group(
            folder,
            (index, own, rename),
            [masters[rank][index] for rank in ranks],
            [states[rank][index] for rank in ranks],
            groups[index],
        )
    )
    return made, [plain_group(group) for group in groups]


def _check_sum(folder: Path, index: int, shapes: Shapes, held: Sequence[int]) -> None:
    """Check the number of elements against the shapes, both rounded up as groups are padded."""
    grain = 2 * len(held)
    wanted, have = sum(map(math.prod, shapes.values())), sum(held)
    if -(-wanted // grain) != -(-have // grain):
        msg = f"{folder}: group {index} has {have} elements in its parts and {wanted} by its shapes; sizes do not fit"
        raise ForeignMismatch(msg)


def _group(
    folder: Path,
    what: tuple[int, Shapes, Callable[[str], str]],
    masters: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, Any]],
    group: Mapping[str, Any],
) -> Iterator[Cut]:
    """The parameters of a group, from masters and states of the ranks over which it is cut."""
    index, shapes, rename = what
    stride, lengths = masters[0].numel(), [part.numel() for part in masters]
    parts: dict[str, list[torch.Tensor | None]] = {"master": [part.reshape(-1) for part in masters]}
    parts |= _slots(states, lengths)
    step, at = _step(states, group), 0
    for local, shape in shapes.items():
        numel, name = math.prod(shape), rename(local)
        slots = {
            slot: placed(flat, stride, at, at + numel, f"{folder}: {slot} of {name!r}") for slot, flat in parts.items()
        }
        yield name, shape, index, step, slots
        at += numel


def _states_by_group(
    optimizers: Sequence[Mapping[str, Any]], count: int
) -> tuple[list[list[Mapping[str, Any]]], list[Mapping[str, Any]]]:
    """State of each rank's flat shard of each group, as lists by rank and group; and the groups."""
    states: list[list[Mapping[str, Any]]] = []
    empty: Mapping[str, Any] = {}
    groups: list[Mapping[str, Any]] = [empty for _ in range(count)]
    for own in optimizers:
        base = own.get("base_optimizer_state")
        if isinstance(base, Mapping) and "param_groups" in base:
            ids = [group["params"][0] if group["params"] else None for group in base["param_groups"]]
            states.append([base["state"].get(key, {}) for key in ids] + [{}] * (count - len(ids)))
            groups = [*base["param_groups"], *groups[len(ids) :]]
        elif isinstance(base, (list, tuple)):  # saved in a form that other numbers of ranks can load
            states.append([*base, *[empty] * (count - len(base))])
        else:
            states.append([empty for _ in range(count)])
    return states, groups[:count]


def _slots(states: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> dict[str, list[torch.Tensor | None]]:
    """Slot -> each rank's tensor with one value per element of its shard, padded or not."""
    names: dict[str, None] = {}
    for state, length in zip(states, lengths, strict=True):
        for slot, value in state.items():
            if isinstance(value, torch.Tensor) and slot != "step" and value.dim() and value.numel() >= length > 0:
                names[slot] = None
    return {
        slot: [v.reshape(-1) if isinstance(v := state.get(slot), torch.Tensor) else None for state in states]
        for slot in names
    }


def _step(states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]) -> int | None:
    for state in states:
        step = number(state.get("step"))
        if step is not None:
            return int(step)
    step = number(group.get("step"))
    return None if step is None else int(step)


def cut_by_parameter(
    folder: Path, shapes: Sequence[Shapes], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[Iterator[Cut], list[dict[str, Any]]]:
    """Stage 3: each parameter is evenly sharded, its end padded; a rank's shards are in sub-groups, in order.

    Raises:
        ForeignMismatch: sizes do not fit.
    """
    ranks, every = len(optimizers), {name: shape for row in shapes for name, shape in row.items()}
    lengths = [part.numel() for part in optimizers[0]["fp32_flat_groups"]]
    for rank, own in enumerate(optimizers):
        if [part.numel() for part in own["fp32_flat_groups"]] != lengths:
            msg = f"{folder}: the sub-groups of rank {rank} and of rank 0 have other sizes; files are of two saves"
            raise ForeignMismatch(msg)
    needed = sum(-(-math.prod(shape) // ranks) for shape in every.values())
    if needed != sum(lengths):
        msg = f"{folder}: each rank holds {sum(lengths)} elements, the shapes need {needed}; sizes do not fit"
        raise ForeignMismatch(msg)
    inner = [own.get("optimizer_state_dict") or own.get("base_optimizer_state") or {} for own in optimizers]
    groups = list(inner[0].get("param_groups") or [{}])
    group_of = [
        next((i for i, group in enumerate(groups) if sub in group.get("params", ())), 0) for sub in range(len(lengths))
    ]
    states = [own.get("state") or {} for own in inner]
    made = _parameters(folder, every, optimizers, states, lengths, [(group_of[i], groups) for i in range(len(lengths))])
    return made, [plain_group(group) for group in groups]


def _parameters(
    folder: Path,
    shapes: Shapes,
    optimizers: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[Any, Any]],
    lengths: Sequence[int],
    group_of: Sequence[tuple[int, Sequence[Mapping[str, Any]]]],
) -> Iterator[Cut]:
    sub, at, parts, step = -1, 0, {}, None
    for name, shape in shapes.items():
        numel = math.prod(shape)
        chunk = -(-numel // len(optimizers))
        while sub < 0 or (at == lengths[sub] and sub + 1 < len(lengths)):
            sub, at = sub + 1, 0
            own = [state.get(sub, {}) for state in states]
            parts = {"master": [o["fp32_flat_groups"][sub].reshape(-1) for o in optimizers]}
            parts |= _slots(own, [lengths[sub]] * len(own))
            step = _step(own, group_of[sub][1][group_of[sub][0]])
        if at + chunk > lengths[sub]:
            msg = f"{folder}: {name!r} needs {chunk} elements of a sub-group that has {lengths[sub] - at} left"
            raise ForeignMismatch(msg)
        slots: dict[str, Values] = {}
        for slot, flat in parts.items():
            cut = [None if part is None else part[at : at + chunk] for part in flat]
            slots[slot] = placed(cut, chunk, 0, numel, f"{folder}: {slot} of {name!r}")
        yield name, shape, group_of[sub][0], step, slots
        at += chunk
