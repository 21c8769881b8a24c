"""The order in which rows travel to experts, and capacities as masks on it.

A token has k choices. Choice `j` of token `s` has the number `s * k + j`. A row is a choice that is sent; rows are
sorted by expert, those of one expert by number, so nothing depends on how a sort treats equal keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PRIORITIES = ("position", "first", "score", "random")
"""Which choices an expert keeps when it is full: early tokens; the same, all first choices before all second ones;
those with the highest logits; a random selection."""


@dataclass(frozen=True, slots=True)
class SortedPlan:
    """Rows of this rank, sorted by expert.

    Attributes:
        places: row of each choice; -1: it is not sent.
        counts: rows for each expert, in host memory.

    Shapes: places [tokens, k], counts [experts]; all int64.
    """

    places: torch.Tensor
    counts: torch.Tensor


def sort_choices(experts: torch.Tensor, kept: torch.Tensor | None, num_experts: int) -> SortedPlan:
    """The plan of these choices; those that are not kept are not sent. Shapes: experts and kept [tokens, k]."""
    keys = experts.reshape(-1)
    if kept is not None:
        keys = torch.where(kept.reshape(-1), keys, num_experts)
    counts = numbers_of(keys, num_experts + 1)[:num_experts].cpu()  # the one wait of a layer for its device
    rows = int(counts.sum())
    order = torch.argsort(keys, stable=True)[:rows]
    places = torch.full_like(keys, -1)
    places[order] = torch.arange(rows, device=keys.device)
    return SortedPlan(places.view_as(experts), counts)


def numbers_of(values: torch.Tensor, count: int) -> torch.Tensor:
    """How often each of 0 to count - 1 is among the values; a device is not waited for, as `bincount` would.

    Shapes: values [n], the result [count], both int64.
    """
    if values.device.type == "cpu":
        return torch.bincount(values, minlength=count)
    return torch.zeros(count, dtype=torch.int64, device=values.device).scatter_add_(0, values, torch.ones_like(values))


def capacity_of(tokens: int, num_experts: int, factor: float, minimum: int) -> int:
    """Rows that one expert takes from one rank: tokens / experts * factor, rounded up, but at least `minimum`."""
    return max(math.ceil(tokens / num_experts * factor), minimum)


def within_capacity(
    experts: torch.Tensor, used: torch.Tensor | None, num_experts: int, capacity: int, order: torch.Tensor
) -> torch.Tensor:
    """Mask of the choices that are among the first `capacity` of their expert.

    Args:
        experts: expert of each choice.
        used: mask of tokens that take part; None: all.
        num_experts: number of experts.
        capacity: rows for each expert.
        order: the numbers of all choices, the most important one first.

    Shapes: experts and the result [tokens, k], used [tokens], order [tokens * k].
    """
    takes_part = torch.ones_like(experts, dtype=torch.bool) if used is None else used[:, None].expand_as(experts)
    ranked = torch.where(takes_part, experts, num_experts).reshape(-1)[order]
    by_expert = torch.argsort(ranked, stable=True)
    counts = numbers_of(ranked, num_experts + 1)
    starts = counts.cumsum(0) - counts
    is_early = torch.arange(ranked.numel(), device=ranked.device) - starts[ranked[by_expert]] < capacity
    kept = torch.empty_like(is_early)
    kept[order[by_expert]] = is_early
    return kept.view_as(experts) & takes_part


def precedence(priority: str, scores: torch.Tensor) -> torch.Tensor:
    """The numbers of all choices, the most important one first; `priority` is one of `PRIORITIES`.

    Shapes: scores [tokens, k], those of the choices; the result is [tokens * k].
    """
    tokens, k = scores.shape
    numbers = torch.arange(tokens * k, device=scores.device)
    if priority == "first":
        return numbers.view(tokens, k).t().reshape(-1)
    if priority == "score":
        return torch.argsort(scores.detach().reshape(-1), descending=True, stable=True)
    if priority == "random":
        return torch.argsort(torch.rand(tokens * k, device=scores.device), stable=True)
    return numbers


def slots(experts: torch.Tensor, kept: torch.Tensor, num_experts: int, *, first_before_second: bool) -> torch.Tensor:
    """Slot of each choice in the buffer of its expert, -1 for one that is not kept. Shapes: all [tokens, k].

    Slots are in the order of tokens; with `first_before_second` those of all first choices come first.
    """
    order = precedence("first" if first_before_second else "position", torch.empty_like(experts, dtype=torch.float32))
    keys = torch.where(kept, experts, num_experts).reshape(-1)[order]
    by_expert = torch.argsort(keys, stable=True)
    counts = numbers_of(keys, num_experts + 1)
    found = torch.empty_like(keys)
    found[order[by_expert]] = (
        torch.arange(keys.numel(), device=keys.device) - (counts.cumsum(0) - counts)[keys[by_expert]]
    )
    return torch.where(kept, found.view_as(experts), -1)
