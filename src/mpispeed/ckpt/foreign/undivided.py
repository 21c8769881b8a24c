"""Reader of replicated optimizer state, of which every rank held all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpispeed.ckpt.foreign.faults import ForeignMismatch
from mpispeed.ckpt.foreign.found import MASTER, Found
from mpispeed.ckpt.foreign.matching import number, plain_group, take_optimizer
from mpispeed.ckpt.foreign.run_state import take_loss_scale
from mpispeed.ckpt.foreign.values import Chain, Plain

_INNER = "optimizer_state_dict"


def take_undivided(found: Found, optimizer: Mapping[str, Any]) -> None:
    """Take the entry "optimizer" of a file with weights: of torch, or of a wrapper that keeps fp32 copies.

    Raises:
        ForeignMismatch: its numbers cannot be matched with names.
    """
    if "param_groups" in optimizer and "state" in optimizer:
        take_optimizer(found, optimizer)
    elif _INNER in optimizer and "fp32_groups" in optimizer:
        take_optimizer(found, optimizer[_INNER], optimizer["fp32_groups"])
    elif _INNER in optimizer and "fp32_groups_flat" in optimizer:
        _take_flat(found, optimizer[_INNER], optimizer["fp32_groups_flat"])
    else:
        msg = (
            f"{found.path}: the optimizer state has the keys {', '.join(map(str, optimizer))}, of no known kind; "
            "import with --weights-only"
        )
        raise ForeignMismatch(msg)
    take_loss_scale(found, optimizer)
    found.rule = found.rule or "Adam"


def _take_flat(found: Found, inner: Mapping[str, Any], masters: Sequence[torch.Tensor]) -> None:
    """One flat tensor per group; only a single group leaves no doubt of which parameters it is made."""
    trained = [param for param in found.params.values() if not param.is_frozen]
    total = sum(param.numel for param in trained)
    if len(masters) != 1 or not total <= masters[0].numel() < total + 2:
        msg = (
            f"{found.path}: the optimizer has {len(masters)} flat groups of {[m.numel() for m in masters]} elements, "
            f"the trained parameters have {total}; which is where is not written. Name those that are not "
            "trained with --frozen, or import with --weights-only"
        )
        raise ForeignMismatch(msg)
    found.groups = [plain_group(group) for group in inner["param_groups"]]
    state: Mapping[str, Any] = next(iter(inner["state"].values()), {})
    flats = {MASTER: Plain(masters[0].reshape(-1))}
    for slot, value in state.items():
        if isinstance(value, torch.Tensor) and slot != "step" and value.numel() == masters[0].numel():
            flats[slot] = Plain(value.reshape(-1))
    step = number(state.get("step", inner["param_groups"][0].get("step")))
    at = 0
    for param in trained:
        param.slots = {slot: Chain([(flat, at, at + param.numel)], flat.dtype) for slot, flat in flats.items()}
        param.group, param.step = 0, int(step or 0)
        at += param.numel
