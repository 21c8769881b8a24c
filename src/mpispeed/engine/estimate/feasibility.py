"""Comparison of a predicted need with a machine's memory, and a search for the smallest change that makes it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpispeed.base.cgroups import Limit
from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_bytes
from mpispeed.config.checks import find_conflicts
from mpispeed.config.offload import OffloadOptimizer
from mpispeed.engine.estimate.host_budget import check_host_budget
from mpispeed.engine.estimate.stages import RankBudget, Source, activations_at, examine_stages
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    import torch

    from mpispeed.config.root import Config
    from mpispeed.engine.estimate.budget import Budget
    from mpispeed.plan.plan import Plan

MOST_DOUBLINGS = 10
"""Doublings of the number of nodes before the search for a change gives up."""

STEP_TOKENS, MOST_STEPS = 64, 2**24
"""Steps of the search for the longest sequence, and their number before it gives up: 2**30 tokens."""

EVEN_TRIES = 12
"""Lengths that a line through the last two chooses, before the search halves what is left."""


# -- the need --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """A job that would be started.

    Attributes:
        config: the settings.
        ranks: number of ranks.
        nodes: number of nodes.
        is_init_sharded: the model is built inside zero.Init, so that no rank ever holds all of it.
        extra_bytes: further need of each rank, such as activations; 0: those that are counted.
        sequence_length: tokens of a sample, for activations and rows to experts; 0: unknown.
    """

    config: Config
    ranks: int
    nodes: int = 1
    is_init_sharded: bool = False
    extra_bytes: int = 0
    sequence_length: int = 0

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the fullest node."""
        return -(-self.ranks // self.nodes)

    @property
    def even_ranks_per_node(self) -> int:
        """Ranks on every node; 0 if nodes differ."""
        return 0 if self.ranks % self.nodes else self.ranks // self.nodes


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of one node's need with the limit. Units: bytes. `change` is the smallest that would fit, if found."""

    is_go: bool
    need_bytes: int
    limit: Limit
    reason: str
    change: str | None = None


def train_bytes(budget: Budget) -> int:
    """Host memory of one rank while it trains; without an accelerator the device is the host."""
    return budget.tier_bytes(Tier.DEVICE) + budget.tier_bytes(Tier.HOST)


def examine(setup: Setup, source: Source, dtype: torch.dtype | None = None) -> tuple[Plan, Sequence[RankBudget]]:
    """Plan of a setup and the prediction for each of its pipeline stages, one without a pipeline.

    `dtype` is that of the model; None: of most of its elements.

    Raises:
        ConfigError: the settings are not possible for so many ranks, or the model cannot be cut so.
    """
    return examine_stages(
        setup.config,
        setup.ranks,
        setup.even_ranks_per_node,
        source,
        dtype,
        in_scope=setup.is_init_sharded,
        sequence_length=setup.sequence_length,
    )


def largest(setup: Setup, stages: Sequence[RankBudget]) -> RankBudget:
    """The stage whose ranks need most memory."""
    return max(stages, key=lambda one: _rank_bytes(setup, one))


def judge(
    setup: Setup,
    source: Source,
    dtype: torch.dtype | None,
    limits: list[Limit],
    examined: tuple[Plan, Sequence[RankBudget]] | None = None,
) -> Verdict:
    """Compare the need of a node with the tightest limit; if it does not fit, search for a change that does.

    `examined` is what `examine` has returned for the setup, if it was called before.

    Raises:
        ConfigError: there is no limit to compare with, or the settings are not possible.
    """
    if not limits:
        msg = "this machine tells no memory limit (/proc/meminfo has no MemAvailable); give one with --memory"
        raise ConfigError(msg)
    limit = min(limits, key=lambda item: item.bytes)
    plan, stages = examined or examine(setup, source, dtype)
    need, most = _node_bytes(setup, plan, stages), largest(setup, stages)
    budget = most.budget
    ranks, rest = setup.ranks_per_node, train_bytes(budget) + besides_bytes(setup, most)
    is_building = budget.build_bytes > rest
    what = "while the model is built" if is_building else "for training"
    relation = "fits into" if need <= limit.bytes else "is more than"
    reason = (
        f"{ranks} rank{'s' * (ranks > 1)} x {_each(setup, most, stages)} {what} = {format_bytes(need)} on a node "
        f"{relation} {format_bytes(limit.bytes)} ({limit.source})"
    )
    refusal = _refusal(setup, stages)
    if refusal:
        reason = refusal
    elif budget.lag_bytes and not is_building:
        reason += f"; {format_bytes(ranks * budget.lag_bytes)} of it only if gradient sums lag behind backward"
    if need <= limit.bytes and not refusal:
        return Verdict(True, need, limit, reason)
    found = next((text for text, other in changes(setup, plan) if _fits(other, source, dtype, limit)), None)
    return Verdict(False, need, limit, reason, found)


def besides_bytes(setup: Setup, one: RankBudget) -> int:
    """Need of a rank besides its states: what the user gave, or else the activations that were counted."""
    return setup.extra_bytes or (0 if one.activations is None else one.activations.peak_bytes)


def _rank_bytes(setup: Setup, one: RankBudget) -> int:
    return max(one.budget.build_bytes, train_bytes(one.budget) + besides_bytes(setup, one))


def longest_sequence(setup: Setup, source: Source, dtype: torch.dtype | None, limits: list[Limit]) -> int:
    """Most tokens of a sample, in steps of STEP_TOKENS, with which a node's need is within the tightest limit; 0: none.

    Activations of a few lengths are counted, and a line through them says which lengths to look at.

    Raises:
        ConfigError: the settings are not possible, or activations cannot be counted.
    """
    _, stages = examine(replace(setup, sequence_length=0, extra_bytes=0), source, dtype)
    limit = min(item.bytes for item in limits) // setup.ranks_per_node
    room = limit - train_bytes(stages[0].budget)
    if stages[0].budget.build_bytes > limit:
        return 0

    def need(length: int) -> int:
        found = activations_at(setup.config, setup.ranks, setup.even_ranks_per_node, source, dtype, length)
        if found.refusal:
            msg = f"the longest sequence that fits is not known: activations are not counted {found.refusal}"
            raise ConfigError(msg)
        return found.peak_bytes

    return STEP_TOKENS * _most(lambda steps: need(steps * STEP_TOKENS), room)


def _most(need: Callable[[int], int], room: int) -> int:
    """The largest n of 1, 2, ... with need(n) <= room, or 0, for a `need` that grows, about as a line."""
    low, high, tries = 0, MOST_STEPS + 1, 0  # low fits, high does not
    before, guess = (0, 0), 8
    while high - low > 1:
        found = need(guess)
        low, high = (low, guess) if found > room else (guess, high)
        slope = (found - before[1]) / (guess - before[0])
        ahead = guess + math.floor((room - found) / slope) if slope > 0 else low + high
        before, tries = (guess, found), tries + 1
        if tries > EVEN_TRIES:
            ahead = (low + high) // 2
        guess = min(max(ahead, low + 1), high - 1)
    return low


def _node_bytes(setup: Setup, plan: Plan, stages: Sequence[RankBudget]) -> int:
    """Need of the node whose ranks together need most; ranks fill node after node."""
    each = [_rank_bytes(setup, one) for one in stages]
    if len(stages) == 1:
        return setup.ranks_per_node * each[0]
    topology, count = plan.topology(), setup.ranks_per_node
    needs = [each[topology.index(rank, "pipe")] for rank in range(setup.ranks)]
    return max(sum(needs[first : first + count]) for first in range(0, setup.ranks, count))


def _each(setup: Setup, most: RankBudget, stages: Sequence[RankBudget]) -> str:
    size = format_bytes(_rank_bytes(setup, most))
    return size if len(stages) == 1 else f"at most {size} (pipeline stage {most.number})"


def _refusal(setup: Setup, stages: Sequence[RankBudget]) -> str:
    """The engine's refusal by `host_memory_limit`, or ""; `lag_bytes` is not counted there."""
    for one in stages:
        rows = one.budget.memory_bytes()
        rows["gradient buckets"] = max(0, rows.get("gradient buckets", 0) - one.budget.lag_bytes)
        problem = check_host_budget(rows, setup.config.host_memory_limit, mapped=0, rlimit=None)
        if problem:
            return problem
    return ""


def _fits(setup: Setup, source: Source, dtype: torch.dtype | None, limit: Limit) -> bool:
    if any(find_conflicts(setup.config)):
        return False
    try:
        plan, stages = examine(setup, source, dtype)
    except ConfigError:
        return False
    return _node_bytes(setup, plan, stages) <= limit.bytes and not _refusal(setup, stages)


def changes(setup: Setup, plan: Plan) -> Iterator[tuple[str, Setup]]:
    """Pairs (description, setup) that need less memory on each node, from small changes to large ones."""
    zero, batch = setup.config.zero_optimization, plan.batch
    # Other numbers of ranks keep the micro-batch of each.
    sizes = {
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "data_parallel_size": None,
        "elasticity": setup.config.elasticity.model_copy(update={"enabled": False}),
    }

    def changed(other: Setup, nodes: int = 1, **keys: object) -> Setup:
        section = zero.model_copy(update=keys)
        config = setup.config.model_copy(update={**sizes, "zero_optimization": section})
        return replace(
            other, config=config, ranks=setup.ranks_per_node * nodes * setup.nodes, nodes=nodes * setup.nodes
        )

    # A pipeline is built outside of zero.Init: each rank builds its own stage.
    init_shard = replace(setup, is_init_sharded=plan.axes["pipe"] == 1)
    scope = ", and build the model inside of mpispeed.zero.Init" if init_shard.is_init_sharded else ""
    here = {"stage": plan.stage, "overlap_comm": plan.is_overlapped}
    levels = range(plan.stage, 4)
    if setup.ranks % setup.nodes == 0:
        if scope and not setup.is_init_sharded and not plan.states.param.is_replicated:
            yield "build the model inside of mpispeed.zero.Init", changed(init_shard, **here)
        if plan.is_overlapped:
            yield '"overlap_comm": false', changed(setup, **{**here, "overlap_comm": False})
        for level in levels[1:]:
            text = f'"zero_optimization": {{"stage": {level}}}'
            yield text, changed(setup, stage=level, overlap_comm=zero.overlap_comm)
        quiet = {"stage": 3, "overlap_comm": False}
        text = '"zero_optimization": {"stage": 3, "overlap_comm": false}'
        yield text, changed(setup, **quiet)
        yield text + scope, changed(init_shard, **quiet)
        if zero.offload_optimizer is None or zero.offload_optimizer.device != "nvme":
            files = OffloadOptimizer.model_validate({"device": "nvme", "nvme_path": "a folder on a local disk"})
            text_files = f'{text[:-1]}, "offload_optimizer": {{"device": "nvme", "nvme_path": {files.nvme_path}}}}}'
            other = changed(init_shard, stage=3, overlap_comm=False, offload_optimizer=files)
            yield text_files + scope, other
        for nodes in (2**power for power in range(1, MOST_DOUBLINGS + 1)):
            count = f"{nodes * setup.nodes} nodes with {setup.ranks_per_node} ranks each"
            yield count, changed(setup, nodes, **here)
            yield f"{count}, {text}{scope}", changed(init_shard, nodes, **quiet)
