"""Comparison of a predicted need with a machine's memory, and a search for the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpispeed.base.cgroups import MemoryGroups, kib_to_bytes, read_fields
from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_bytes
from mpispeed.config.checks import find_conflicts
from mpispeed.config.offload import OffloadOptimizer
from mpispeed.engine.estimate.budget import Budget, gather_inputs, predict
from mpispeed.engine.estimate.host_budget import check_host_budget
from mpispeed.plan.plan import Plan, make_plan
from mpispeed.store.placement import Tier

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.config.root import Config

MOST_DOUBLINGS = 10
"""Doublings of the number of nodes before the search for a change gives up."""


# -- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """Remainder of one memory limit of this machine. Units: bytes."""

    source: str
    bytes: int


def machine_limits(proc: Path = Path("/proc")) -> list[Limit]:
    """Remaining memory of this machine: MemAvailable, and the rest of every memory cgroup (v1, v2) of this process.

    File cache that a cgroup can drop counts as free, as it does in MemAvailable.
    """
    found = []
    available = kib_to_bytes(dict(read_fields(proc / "meminfo")).get("MemAvailable"))
    if available is not None:
        found.append(Limit("MemAvailable of /proc/meminfo", available))
    groups = MemoryGroups.of("self", proc=proc)
    for folder in groups.folders:
        most = groups.limit(folder)
        if most is not None:
            used = max(0, (groups.usage(folder) or 0) - groups.inactive_cache(folder))
            found.append(Limit(str(groups.limit_file(folder)), max(0, most - used)))
    return found


# -- the need --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """A job that would be started.

    Attributes:
        config: the settings.
        ranks: number of ranks.
        nodes: number of nodes.
        is_init_sharded: the model is built inside zero.Init, so that no rank ever holds all of it.
        extra_bytes: further need of each rank, such as activations.
    """

    config: Config
    ranks: int
    nodes: int = 1
    is_init_sharded: bool = False
    extra_bytes: int = 0

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


def examine(setup: Setup, model: nn.Module, dtype: torch.dtype) -> tuple[Plan, Budget]:
    """Plan and prediction of a setup.

    Raises:
        ConfigError: the settings are not possible for so many ranks.
    """
    plan = make_plan(setup.config, setup.ranks, dtype, ranks_per_node=setup.even_ranks_per_node)
    is_init_sharded = setup.is_init_sharded and not plan.states.param.is_replicated
    return plan, predict(gather_inputs(plan, model, is_init_sharded=is_init_sharded))


def judge(setup: Setup, model: nn.Module, dtype: torch.dtype, limits: list[Limit]) -> Verdict:
    """Compare the need of a node with the tightest limit; if it does not fit, search for a change that does.

    Raises:
        ConfigError: there is no limit to compare with, or the settings are not possible.
    """
    if not limits:
        msg = "this machine tells no memory limit (/proc/meminfo has no MemAvailable); give one with --memory"
        raise ConfigError(msg)
    limit = min(limits, key=lambda item: item.bytes)
    plan, budget = examine(setup, model, dtype)
    need = _node_bytes(setup, budget)
    ranks, rest = setup.ranks_per_node, train_bytes(budget) + setup.extra_bytes
    is_building = budget.build_bytes > rest
    what = "while the model is built" if is_building else "for training"
    relation = "fits into" if need <= limit.bytes else "is more than"
    reason = (
        f"{ranks} rank{'s' * (ranks > 1)} x {format_bytes(need // ranks)} {what} = {format_bytes(need)} on a node "
        f"{relation} {format_bytes(limit.bytes)} ({limit.source})"
    )
    refusal = _refusal(setup, budget)
    if refusal:
        reason = refusal
    elif budget.lag_bytes and not is_building:
        reason += f"; {format_bytes(ranks * budget.lag_bytes)} of it only if gradient sums lag behind backward"
    if need <= limit.bytes and not refusal:
        return Verdict(True, need, limit, reason)
    found = next((text for text, other in changes(setup, plan) if _fits(other, model, dtype, limit)), None)
    return Verdict(False, need, limit, reason, found)


def _node_bytes(setup: Setup, budget: Budget) -> int:
    return setup.ranks_per_node * max(budget.build_bytes, train_bytes(budget) + setup.extra_bytes)


def _refusal(setup: Setup, budget: Budget) -> str:
    """The engine's refusal by `host_memory_limit`, or ""; `lag_bytes` is not counted there."""
    rows = budget.memory_bytes()
    rows["gradient buckets"] = max(0, rows.get("gradient buckets", 0) - budget.lag_bytes)
    return check_host_budget(rows, setup.config.host_memory_limit, mapped=0, rlimit=None)


def _fits(setup: Setup, model: nn.Module, dtype: torch.dtype, limit: Limit) -> bool:
    if any(find_conflicts(setup.config)):
        return False
    try:
        _, budget = examine(setup, model, dtype)
    except ConfigError:
        return False
    return _node_bytes(setup, budget) <= limit.bytes and not _refusal(setup, budget)


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

    init_shard = replace(setup, is_init_sharded=True)
    here = {"stage": plan.stage, "overlap_comm": plan.is_overlapped}
    levels = range(plan.stage, 4)
    if setup.ranks % setup.nodes == 0:
        if not setup.is_init_sharded and not plan.states.param.is_replicated:
            yield "build the model inside of mpispeed.zero.Init", changed(init_shard, **here)
        if plan.is_overlapped:
            yield '"overlap_comm": false', changed(setup, **{**here, "overlap_comm": False})
        for level in levels[1:]:
            text = f'"zero_optimization": {{"stage": {level}}}'
            yield text, changed(setup, stage=level, overlap_comm=zero.overlap_comm)
        quiet = {"stage": 3, "overlap_comm": False}
        text = '"zero_optimization": {"stage": 3, "overlap_comm": false}'
        yield text, changed(setup, **quiet)
        yield f"{text}, and build the model inside of mpispeed.zero.Init", changed(init_shard, **quiet)
        if zero.offload_optimizer is None or zero.offload_optimizer.device != "nvme":
            files = OffloadOptimizer.model_validate({"device": "nvme", "nvme_path": "a folder on a local disk"})
            text_files = f'{text[:-1]}, "offload_optimizer": {{"device": "nvme", "nvme_path": {files.nvme_path}}}}}'
            other = changed(init_shard, stage=3, overlap_comm=False, offload_optimizer=files)
            yield f"{text_files}, and build the model inside of mpispeed.zero.Init", other
        for nodes in (2**power for power in range(1, MOST_DOUBLINGS + 1)):
            count = f"{nodes * setup.nodes} nodes with {setup.ranks_per_node} ranks each"
            yield count, changed(setup, nodes, **here)
            yield (
                f"{count}, {text}, and build the model inside of mpispeed.zero.Init",
                changed(init_shard, nodes, **quiet),
            )
