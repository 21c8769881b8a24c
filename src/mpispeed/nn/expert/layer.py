"""A layer of experts: tokens are routed to experts, which the ranks of an expert-parallel group share out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mpispeed.base.distinct import mark_distinct
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.even_split import share
from mpispeed.mesh.comm import Comm
from mpispeed.native.row_ops import combine, permute
from mpispeed.nn.expert.dispatch import EXPERTS_TRAIN, TOKENS_TRAIN, Dispatcher, Levels
from mpispeed.nn.expert.experts import AT_HAND, Experts, FusedExperts, Hands, ranged
from mpispeed.nn.expert.router import Router, Routing, require_whole
from mpispeed.nn.expert.sorted_plan import sort_choices
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.apply import Layers
from mpispeed.nn.tensor.tensor_cut import marks_of


class RoutedExperts(nn.Module):
    """Router, exchange of rows and experts, with an expert that sees every token beside them if wanted.

    Without a group all experts are on this rank. Before a layer is used over several ranks `set_expert_group` gives it
    its part.

    Attributes:
        gate: the router.
        experts: those of this rank.
        shared: the expert for all tokens, or None.
        ep_size: ranks that the experts are meant for; for information until the group is set.
        slices_experts: where the model's layers are sliced, slice the experts too. Otherwise each slice has them whole,
            and sends its part of the tokens to them.
        shared_overlap: compute `shared` while outputs of experts travel back, and its backward pass while gradients of
            these travel; with the same bits. A thread beside the computation carries the exchange out.
        dispatcher: exchanges rows over the group; None before it is set.
        experts_name: name of the module of the experts.
    """

    experts_name = "experts"
    slices_experts = False
    _slices: Comm | None = None  # among which tokens are divided

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        *,
        ep_size: int = 1,
        slices_experts: bool = False,
        shared_overlap: bool = False,
    ) -> None:
        """Put the parts together. `shared_overlap`, `slices_experts`: as the attributes.

        Raises:
            ConfigError: router and experts do not fit to each other, or `ep_size` is not from 1 on.
        """
        super().__init__()
        if gate.num_experts != experts.num_experts:
            msg = f"a router of {gate.num_experts} experts for a layer of {experts.num_experts}; make both for as many"
            raise ConfigError(msg)
        require_whole("ep_size", ep_size)
        if ep_size < 1:
            msg = f"ep_size = {ep_size} ranks cannot share experts out; choose a number from 1 on"
            raise ConfigError(msg)
        self.slices_experts = slices_experts
        self.gate, self.experts, self.shared, self.ep_size = gate, experts, shared, ep_size
        self.shared_overlap = shared_overlap
        if ep_size > 1:
            mark_distinct(experts.parameters(), ep_size)
        self.dispatcher: Dispatcher | None = None

    @property
    def comm(self) -> Comm | None:
        """The expert-parallel group; None before it is set."""
        return None if self.dispatcher is None else self.dispatcher.comm

    def set_expert_group(self, comm: Comm, levels: Levels | None = None, *, hands: Hands = AT_HAND) -> None:
        """Share the experts out over a group; this rank keeps its own.

        Args:
            comm: the group.
            levels: exchange rows in two levels, inside of nodes and between them.
            hands: changes parameters whose values are elsewhere.

        Raises:
            UsageError: the layer has a group already.
            ConfigError: the experts on this rank are neither all nor its part.
        """
        if self.dispatcher is not None:
            msg = f"this layer of experts has its group of {self.dispatcher.comm.size} ranks already; set it once"
            raise UsageError(msg)
        self.experts.keep(ranged(self.experts.num_experts, comm), hands)
        self.ep_size = comm.size
        if comm.size > 1:
            mark_distinct(self.experts.parameters(), comm.size)
        self.dispatcher = Dispatcher(comm, self.experts.num_experts, levels)

    def whole_part(self) -> tuple[str, str]:
        """As `SlicesItself`."""
        return ("", "") if self.slices_experts else (self.experts_name, "an expert, whole as slices_experts is False")

    def slice_over(self, comm: Comm, layers: Layers, grain: int) -> list[str]:
        """As `SlicesItself`. Experts that are modules are sliced by policies."""
        if self.slices_experts and isinstance(self.experts, FusedExperts):
            experts = self.experts
            layers.replaced(experts, lambda: experts.slice_over(comm, grain))
            return [self.experts_name]
        if not self.slices_experts:
            self._slices = comm
            for module in self.experts.modules():
                marks_of(module).partial.update(name for name, _ in module.named_parameters(recurse=False))
        return []

    def __getstate__(self) -> dict[str, Any]:
        """For copies: they have the experts of this rank, with their numbers, and no group; `initialize` sets one."""
        return {**self.__dict__, "dispatcher": None}

    def leave_expert_group(self) -> None:
        """Forget the group; the experts of this rank stay, counted from 0 until a group of as many ranks is set."""
        if self.experts.held.start:  # layers that are made for the rank with most experts may have one to spare yet
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
        shared = self.shared
        y = self._experts_of(tokens, routing, None if shared is None else lambda: shared(x))
        return y.view(x.shape), routing

    def _experts_of(
        self, tokens: torch.Tensor, routing: Routing, shared: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Outputs of the routed experts, plus that of the one for all tokens.

        Collective over: the group, and slices that divide the tokens, which have equal ones.

        Shapes: tokens and the result [tokens, hidden]; `shared` may return any shape of as many elements.
        """
        part, experts, kept, weights = self._own_part(tokens, routing)
        plan = sort_choices(experts, kept, self.experts.num_experts)
        self.gate.warn()  # here, because the device has just been waited for
        rows = permute(part, plan.places, int(plan.counts.sum()))

        def joined(outputs: torch.Tensor) -> torch.Tensor:
            y = combine(outputs, plan.places, weights)
            return y if self._slices is None else regions.gather_from(y, self._slices, 0, len(tokens))

        if self.dispatcher is None:
            y = joined(self._computed(rows, plan.counts.tolist()))
            return y if shared is None else y + shared().view(y.shape)
        deal = self.dispatcher.deal(plan.counts, self._needs(part))
        done = self._computed(deal.there(rows), deal.expert_counts)
        if shared is not None and self.shared_overlap:
            done, beside = deal.back_beside(done, shared)
            return joined(done) + beside.view(tokens.shape)
        y = joined(deal.back(done))
        return y if shared is None else y + shared().view(y.shape)

    def _own_part(
        self, tokens: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Tokens, experts, mask of kept choices and weights of what this rank sends."""
        slices, kept = self._slices, routing.kept
        if slices is None:
            return tokens, routing.experts, kept, routing.weights
        found = self.own_tokens(len(tokens))
        own = slice(found.start, found.stop)
        part, weights = regions.scatter_to(tokens, slices, 0), regions.scatter_to(routing.weights, slices, 0)
        return part, routing.experts[own], None if kept is None else kept[own], weights

    def own_tokens(self, tokens: int) -> range:
        """Those of so many tokens that this rank sends to experts: all, or its part of what slices divide."""
        return range(tokens) if self._slices is None else range(*share(tokens, self._slices.rank, self._slices.size))

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
