"""A layer of experts: tokens are routed to experts, which the ranks of an expert-parallel group share out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mpispeed.base.distinct import mark_distinct
from mpispeed.base.errors import UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.native.row_ops import combine, permute
from mpispeed.nn.expert.dispatch import EXPERTS_TRAIN, TOKENS_TRAIN, Dispatcher, Levels
from mpispeed.nn.expert.experts import Experts, ranged
from mpispeed.nn.expert.router import Router, Routing
from mpispeed.nn.expert.sorted_plan import sort_choices


class RoutedExperts(nn.Module):
    """Router, exchange of rows and experts, with an expert that sees every token beside them if wanted.

    Without a group all experts are on this rank. Before a layer is used over several ranks `set_expert_group` gives it
    its part.

    Attributes:
        gate: the router.
        experts: those of this rank.
        shared: the expert for all tokens, or None.
        ep_size: ranks that the experts are meant for; for information until the group is set.
        dispatcher: exchanges rows over the group; None before it is set.
        experts_name: name of the module of the experts.
    """

    experts_name = "experts"

    def __init__(self, gate: Router, experts: Experts, shared: nn.Module | None = None, *, ep_size: int = 1) -> None:
        """Put the parts together."""
        super().__init__()
        self.gate, self.experts, self.shared, self.ep_size = gate, experts, shared, ep_size
        if ep_size > 1:
            mark_distinct(experts.parameters(), ep_size)
        self.dispatcher: Dispatcher | None = None

    @property
    def comm(self) -> Comm | None:
        """The expert-parallel group; None before it is set."""
        return None if self.dispatcher is None else self.dispatcher.comm

    def set_expert_group(self, comm: Comm, levels: Levels | None = None) -> None:
        """Share the experts out over a group; this rank keeps its own.

        Args:
            comm: the group.
            levels: exchange rows in two levels, inside of nodes and between them.

        Raises:
            UsageError: the layer has a group already.
            ConfigError: the experts on this rank are neither all nor its part.
        """
        if self.dispatcher is not None:
            msg = f"this layer of experts has its group of {self.dispatcher.comm.size} ranks already; set it once"
            raise UsageError(msg)
        self.experts.keep(ranged(self.experts.num_experts, comm))
        self.ep_size = comm.size
        if comm.size > 1:
            mark_distinct(self.experts.parameters(), comm.size)
        self.dispatcher = Dispatcher(comm, self.experts.num_experts, levels)

    def __getstate__(self) -> dict[str, Any]:
        """For copies: they have the experts of this rank, with their numbers, and no group; `initialize` sets one."""
        return {**self.__dict__, "dispatcher": None}

    def leave_expert_group(self) -> None:
        """Forget the group; the experts of this rank stay, counted from 0 until a group of as many ranks is set."""
        self.experts.keep(range(len(self.experts.held)))
        self.dispatcher = None

    def forward(self, x: torch.Tensor, used_token: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        """The weighted sum of experts for each token, and the router's losses and counts.

        Collective over: the expert-parallel group, forward and backward; ranks may have any number of tokens.

        Shapes: x [..., hidden], used_token [...] or [tokens]; the result is [..., hidden].
        """
        tokens = x.reshape(-1, x.shape[-1])
        sequences = max(math.prod(x.shape[:-2]), 1)
        routing = self.gate(tokens, used_token, sequences)
        y = self._experts_of(tokens, routing).view(x.shape)
        return y if self.shared is None else y + self.shared(x), routing

    def _experts_of(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Collective over: the expert-parallel group."""
        plan = sort_choices(routing.experts, routing.kept, self.experts.num_experts)
        self.gate.warn()  # here, because the device has just been waited for
        rows = permute(tokens, plan.places, int(plan.counts.sum()))
        if self.dispatcher is None:
            return combine(self._computed(rows, plan.counts.tolist()), plan.places, routing.weights)
        deal = self.dispatcher.deal(plan.counts, self._needs(tokens))
        done = self._computed(deal.there(rows), deal.expert_counts)
        return combine(deal.back(done), plan.places, routing.weights)

    def _computed(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        if len(counts) != len(self.experts.held):
            msg = (
                f"{len(self.experts.held)} of {self.experts.num_experts} experts are on this rank, and no other ranks "
            )
            msg += "are known; pass the model to mpispeed.initialize, or call set_expert_group of this layer"
            raise UsageError(msg)
        return self.experts(rows, counts).to(rows.dtype)

    def _needs(self, tokens: torch.Tensor) -> int:
        """What gradients are wanted for on this rank."""
        if not torch.is_grad_enabled():
            return 0
        trains = any(param.requires_grad for param in self.experts.parameters())
        return TOKENS_TRAIN * tokens.requires_grad | EXPERTS_TRAIN * trains
