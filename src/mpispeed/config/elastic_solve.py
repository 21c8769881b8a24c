"""The batch size that the most numbers of ranks divide. Pure integers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpispeed.base.errors import ElasticityError, ElasticityIncompatibleWorldSize

# Numbers with more divisors than any smaller one: a batch of so many micro-batches divides among the most ranks.
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Demand:
    """What the batch size has to fulfil.

    Attributes:
        max_batch: it is not greater, in samples.
        micro_batches: samples of one forward pass that are allowed.
        least, most: numbers of ranks that count.
        prefers_larger: the greater of two batches that as many numbers of ranks divide.
        sharing: ranks that share one model; above 1, ranks come in nodes.
        per_node: ranks of a node; numbers of ranks are then whole nodes.
    """

    max_batch: int
    micro_batches: tuple[int, ...]
    least: int = 1
    most: int = 10000
    prefers_larger: bool = True
    sharing: int = 1
    per_node: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch size in samples, and the numbers of data-parallel ranks among which it divides, ascending."""

    batch: int
    counts: tuple[int, ...]


def solve(demand: Demand) -> Choice:
    """The batch for ranks that come one by one (version 0.1).

    Raises:
        ElasticityError: a micro-batch is greater than the batch, or no number of ranks is left.
    """
    for micro in demand.micro_batches:
        if micro > demand.max_batch:
            msg = f"micro_batch_sizes: {micro} is more than max_train_batch_size {demand.max_batch}; leave it out"
            raise ElasticityError(msg)
    bases = sorted({*demand.micro_batches, math.lcm(*demand.micro_batches)})
    found = [
        Choice(batch, _counts(batch, demand)) for batch in {_greatest_batch(base, demand.max_batch) for base in bases}
    ]
    sign = 1 if demand.prefers_larger else -1
    best = max(found, key=lambda choice: (len(choice.counts), sign * choice.batch))
    if not best.counts:
        msg = (
            f"no number of ranks from min_gpus {demand.least} to max_gpus {demand.most} divides a batch of at most "
            f"{demand.max_batch} samples into micro-batches of {_listed(demand.micro_batches)}; widen the range"
        )
        raise ElasticityError(msg)
    return best


def solve_nodes(demand: Demand) -> Choice:
    """The batch for ranks that come in whole nodes and share models (version 0.2); counts are data-parallel ranks.

    Raises:
        ElasticityError: models do not divide the ranks of a node, or as `solve`.
    """
    per_node = _data_per_node(demand)
    batch = demand.max_batch // per_node
    if per_node > 1 and max(demand.micro_batches) > batch:
        msg = (
            f"micro_batch_sizes: {max(demand.micro_batches)} is more than {batch}, the part of max_train_batch_size "
            f"{demand.max_batch} for each of the {per_node} data-parallel ranks of a node; leave it out"
        )
        raise ElasticityError(msg)
    of_nodes = replace(
        demand,
        max_batch=batch,
        least=demand.least // demand.per_node or 1,
        most=demand.most // demand.per_node or batch // min(demand.micro_batches),
        sharing=1,
        per_node=1,
    )
    choice = solve(of_nodes)
    return Choice(choice.batch * per_node, tuple(per_node * count for count in choice.counts))


def solve_here(demand: Demand, ranks: int) -> Choice:
    """As `solve_nodes`; where `ranks` are none of its numbers, the greatest batch for them alone.

    Raises:
        ElasticityIncompatibleWorldSize: `ranks` are no whole nodes, or too many for the batch.
        ElasticityError: as `solve_nodes`.
    """
    choice = solve_nodes(demand)
    if ranks % demand.sharing == 0 and ranks // demand.sharing in choice.counts:
        return choice
    if ranks % demand.per_node:
        msg = f"{ranks} ranks are no whole number of nodes of num_gpus_per_node {demand.per_node} ranks"
        raise ElasticityIncompatibleWorldSize(msg)
    data = ranks // demand.sharing
    found = [micro * data * (demand.max_batch // (micro * data)) for micro in demand.micro_batches]
    usable = [batch for batch in found if batch]
    if not usable:
        msg = (
            f"{data} data-parallel ranks with micro-batches of at least {min(demand.micro_batches)} need a batch of "
            f"{min(demand.micro_batches) * data}, and max_train_batch_size is {demand.max_batch}"
        )
        raise ElasticityIncompatibleWorldSize(msg)
    return Choice((max if demand.prefers_larger else min)(usable), (data,))


def pick_micro(batch: int, data: int, micro_batches: Iterable[int], *, prefers_larger: bool = True) -> int:
    """Samples of one forward pass: the greatest, or the first listed, that divides the samples of a rank.

    Raises:
        ElasticityError: none does.
    """
    listed = list(micro_batches)
    found = [micro for micro in listed if batch % data == 0 and batch // data % micro == 0]
    if not found:
        msg = f"none of micro_batch_sizes {_listed(listed)} divides the samples of a rank: {batch} over {data} ranks"
        raise ElasticityError(msg)
    return max(found) if prefers_larger else found[0]


def _data_per_node(demand: Demand) -> int:
    if demand.per_node % demand.sharing:
        msg = (
            f"num_gpus_per_node {demand.per_node} is no multiple of model_parallel_size {demand.sharing}: a node has "
            "whole models"
        )
        raise ElasticityError(msg)
    return demand.per_node // demand.sharing


def _greatest_batch(base: int, limit: int) -> int:
    if base >= limit:
        return base
    return base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, limit // base) - 1]


def _counts(batch: int, demand: Demand) -> tuple[int, ...]:
    """All numbers of ranks in the range that cut the batch into whole micro-batches."""
    cuts = {batch // micro for micro in demand.micro_batches if batch % micro == 0}
    found = {count for cut in cuts for count in _divisors(cut, demand.most)}
    return tuple(sorted(count for count in found if demand.least <= count <= demand.most))


def _divisors(number: int, most: int) -> set[int]:
    """All divisors up to `most`, and some beyond."""
    small = {low for low in range(1, min(math.isqrt(number), most) + 1) if number % low == 0}
    return small | {number // low for low in small}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
