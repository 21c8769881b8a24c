"""DeepSpeed's gating functions: from logits to the masks of the dense form of a layer of experts.

The layers here do not make these masks, which have tokens * experts * capacity elements. Choices, capacities and losses
are those of the router.
"""

from __future__ import annotations

from typing import Any

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.expert.router import Router, RouterOptions
from mpispeed.nn.expert.sorted_plan import capacity_of, slots

__all__ = ["top1gating", "top2gating", "topkgating"]

Gating = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DROP_POLICIES = {"probs": "score", "position": "position"}


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Comm | None = None,
    use_tutel: bool = False,
) -> Gating:
    """One expert for each token.

    Returns:
        The balance loss, weights [tokens, experts, capacity], the mask of those that are not zero, and the number of
        choices of each expert before any is dropped.

    Collective over: `ep_group`, if given: its ranks get the largest of their capacities.
    """
    noise = "RSample" if noisy_gate_policy == "RSample" else None
    options = _options(1, capacity_factor, min_capacity, drop_tokens, "random" if use_rts else "position", noise=noise)
    return _gated(logits, options, used_token, ep_group)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Comm | None = None,
    top2_2nd_expert_sampling: bool = True,
) -> Gating:
    """Two experts for each token; results as those of `top1gating`. Collective over: `ep_group`, if given."""
    sampling = top2_2nd_expert_sampling
    options = _options(2, capacity_factor, min_capacity, drop_tokens, "first", sample_second=sampling)
    return _gated(logits, options, None, ep_group)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Comm | None = None,
    drop_policy: str = "probs",
) -> Gating:
    """The experts of the k highest logits; results as those of `top1gating`. Collective over: `ep_group`, if given.

    Raises:
        ConfigError: the policy is unknown.
    """
    if drop_policy not in DROP_POLICIES:
        msg = f"drop_policy = {drop_policy!r} is unknown; known are {', '.join(map(repr, DROP_POLICIES))}"
        raise ConfigError(msg)
    options = _options(k, capacity_factor, min_capacity, drop_tokens, DROP_POLICIES[drop_policy], renormalize=True)
    return _gated(logits, options, None, ep_group)


def _options(
    k: int, capacity_factor: float, min_capacity: int, drop_tokens: bool, priority: str, **others: Any
) -> RouterOptions:
    factor = capacity_factor if drop_tokens else None
    return RouterOptions(k=k, capacity_factor=factor, min_capacity=min_capacity, priority=priority, **others)


def _gated(
    logits: torch.Tensor, options: RouterOptions, used_token: torch.Tensor | None, ep_group: Comm | None
) -> Gating:
    """Collective over: `ep_group`, if given."""
    tokens, num_experts = logits.shape
    router = Router(1, num_experts, options).to(logits.device)
    used = None if used_token is None else used_token.reshape(-1) != 0
    routing = router.route(logits.float(), used)
    kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
    factor = options.capacity_factor
    if factor is None:
        capacity = max(int(routing.counts.max()), 1)
    else:
        capacity = capacity_of(tokens, num_experts, factor * options.k, options.min_capacity)
    if ep_group is not None:
        largest = torch.tensor([capacity])
        ep_group.all_reduce(largest, "max")
        capacity = int(largest)
    is_second_behind = options.priority == "first"
    places = slots(routing.experts, kept, num_experts, first_before_second=is_second_behind)
    token, choice = kept.nonzero(as_tuple=True)
    weights = logits.new_zeros((tokens, num_experts, capacity), dtype=torch.float32)
    index = (token, routing.experts[token, choice], places[token, choice])
    weights = weights.index_put(index, routing.weights[token, choice])
    return routing.balance_loss, weights, weights != 0, routing.counts
