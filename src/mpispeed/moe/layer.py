"""DeepSpeed's layer of experts."""

from __future__ import annotations

import logging

import torch
from torch import nn

from mpispeed.base import log
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.mesh.world import start
from mpispeed.nn.expert.dispatch import Levels
from mpispeed.nn.expert.experts import ExpertModules
from mpispeed.nn.expert.layer import RoutedExperts
from mpispeed.nn.expert.router import Router, RouterOptions, require_whole

__all__ = ["MoE"]

PRIORITY = {1: "position", 2: "first"}
"""Which choices a full expert keeps, by k, in DeepSpeed; with more, those of the highest logits."""

logger = logging.getLogger(__name__)


class MoE(nn.Module):
    """Mixture of experts, with the arguments, results and names of parameters of DeepSpeed's.

    Rows go to experts without padding, so ranks may have different numbers of tokens. Capacities follow the tokens of
    each rank alone.

    Sources: Rajbhandari et al., "DeepSpeed-MoE", arXiv 2201.05596; Lepikhin et al., "GShard", arXiv 2006.16668.

    Attributes:
        deepspeed_moe: router and experts, as `gate` and `experts`.
        num_experts: experts of the layer, on all ranks.
        ep_size: ranks that share the experts out.
        expert_group_name: "ep_size_" and their number.
        mlp: with `use_residual`, the module that all tokens go through, too.
        coefficient: with `use_residual`, the linear map to the weights of both.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """Copy the expert as often as this rank has experts.

        Args:
            hidden_size: of tokens.
            expert: the module that experts are copies of; it keeps the width. Of a tuple the first element counts.
            num_experts: experts of the layer, on all ranks.
            ep_size: ranks that share the experts out, at most `num_experts`; where they do not divide, the first ranks
                have one expert more.
            k: experts for each token.
            capacity_factor: an expert takes tokens / experts * k times this from each rank, in training.
            eval_capacity_factor: the same in evaluation.
            min_capacity: it takes at least so many.
            use_residual: mix with `expert` itself, which sees every token.
            noisy_gate_policy: None, "None", "Jitter" (of the router's input) or "RSample" (of the choice, for k = 1).
            drop_tokens: choices that a full expert does not take are dropped; False: experts take all.
            use_rts: for k = 1, a full expert keeps a random selection instead of the first tokens.
            use_tutel: accepted; the one path here does without padding, as Tutel's.
            enable_expert_tensor_parallelism: where the model's layers are sliced, slice experts too; otherwise each
                slice has whole experts, and sends them its part of the tokens.
            top2_2nd_expert_sampling: for k = 2, sample the second expert with Gumbel noise, in training.

        Raises:
            ConfigError: numbers do not fit to each other.
        """
        super().__init__()
        _check(num_experts, ep_size, noisy_gate_policy, use_tutel)
        self.num_experts, self.ep_size = num_experts, ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        factors = (capacity_factor, eval_capacity_factor) if drop_tokens else (None, None)
        options = _options(k, factors, min_capacity, use_rts, noisy_gate_policy, top2_2nd_expert_sampling)
        experts = ExpertModules(expert, num_experts, -(-num_experts // ep_size))
        for param in experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = self.expert_group_name  # type: ignore[attr-defined]
        router, slices_experts = Router(hidden_size, num_experts, options), enable_expert_tensor_parallelism
        self.deepspeed_moe = RoutedExperts(router, experts, ep_size=ep_size, slices_experts=slices_experts)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    @property
    def num_local_experts(self) -> int:
        """Experts of this rank; before it has its group, those of the rank with most."""
        return len(self.deepspeed_moe.experts.held)

    def set_expert_group(self, comm: Comm, levels: Levels | None = None) -> None:
        """Tell the layer the ranks that share its experts out; done by `mpispeed.initialize`.

        Args:
            comm: `ep_size` ranks; rank r of them has the r-th part of the experts.
            levels: exchange rows in two levels, inside of nodes and between them.

        Raises:
            ConfigError: the group has another size.
            UsageError: the layer has a group already.
        """
        if comm.size != self.ep_size:
            msg = f"a group of {comm.size} ranks for a layer with ep_size = {self.ep_size}"
            raise ConfigError(msg)
        self.deepspeed_moe.set_expert_group(comm, levels)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make the group of the layer from all ranks of the job, for models that are trained without an engine.

        Groups are consecutive ranks, or, with `use_data_before_expert_parallel_`, ranks at equal distances.

        Collective over: all ranks.

        Raises:
            ConfigError: `ep_size` does not divide the number of ranks.
            UsageError: the layer has a group already.
        """
        if self.deepspeed_moe.comm is not None:
            msg = f"this layer has its group of ep_size = {self.ep_size} ranks already; set it once"
            raise UsageError(msg)
        world = start().comm
        if world.size % self.ep_size:
            msg = f"ep_size = {self.ep_size} does not divide the {world.size} ranks of this job"
            raise ConfigError(msg)
        groups = world.size // self.ep_size
        if use_data_before_expert_parallel_:
            color, members = world.rank % groups, world.ranks[world.rank % groups :: groups]
        else:
            color = world.rank // self.ep_size
            members = world.ranks[color * self.ep_size : (color + 1) * self.ep_size]
        self.set_expert_group(world.split(color, members, (self.expert_group_name,)))

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Apply the layer.

        Args:
            hidden_states: the tokens.
            used_token: 0 for tokens that go to no expert, such as padding; heeded for k = 1, as in DeepSpeed.

        Returns:
            The outputs; the balance loss, to be added to the loss with a small factor; the number of choices of each
            expert on this rank, dropped ones too.

        Collective over: the ranks that share the experts out; they may have any number of tokens.

        Shapes: hidden_states and outputs [..., hidden], used_token [tokens], counts [experts].
        """
        if used_token is not None and self.deepspeed_moe.gate.options.k > 1:
            log.once(logger, logging.WARNING, "used_token is heeded for k = 1 only, as in DeepSpeed; leave it out")
            used_token = None
        output, routing = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            beside = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside
            share = torch.softmax(self.coefficient(hidden_states), -1)
            output = output * share[..., 0:1] + beside * share[..., 1:]
        return output, routing.balance_loss, routing.counts


def _options(
    k: int, factors: tuple[float | None, float | None], minimum: int, use_rts: bool, noise: str | None, samples: bool
) -> RouterOptions:
    """DeepSpeed's settings as those of a router; `factors` of capacity in training and evaluation."""
    return RouterOptions(
        k=k,
        capacity_factor=factors[0],
        eval_capacity_factor=factors[1],
        min_capacity=minimum,
        priority="random" if k == 1 and use_rts else PRIORITY.get(k, "score"),
        noise=None if noise == "None" else noise,
        sample_second=samples,
    )


def _check(num_experts: int, ep_size: int, noisy_gate_policy: str | None, use_tutel: bool) -> None:
    if use_tutel:
        log.once(logger, logging.INFO, "use_tutel has no effect: rows go to experts without padding in any case")
    require_whole("num_experts", num_experts)
    require_whole("ep_size", ep_size)
    if num_experts < 1:
        msg = f"num_experts = {num_experts}: a layer of experts needs at least one"
        raise ConfigError(msg)
    if not 1 <= ep_size <= num_experts:
        msg = (
            f"ep_size = {ep_size} ranks cannot share {num_experts} experts out; choose a number from 1 to {num_experts}"
        )
        raise ConfigError(msg)
    if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
        msg = f"noisy_gate_policy = {noisy_gate_policy!r} is unknown; use None, 'None', 'Jitter' or 'RSample'"
        raise ConfigError(msg)
