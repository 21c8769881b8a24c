"""The batch size that the most numbers of ranks divide. Pure integers."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from mpispeed.base.errors import ElasticityError, ElasticityIncompatibleWorldSize
from mpispeed.config.elastic import MOST_RANKS

# Numbers with more divisors than any smaller one: a batch of so many micro-batches divides among the most ranks.
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Demand:
    """Conditions on the batch size.

    Attributes:
        max_batch: upper limit, in samples.
        micro_batches: allowed samples of one forward pass.
        least, most: range of numbers of ranks.
        prefers_larger: choose the larger of two batches that equally many numbers of ranks divide.
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

    def has(self, count: int) -> bool:
        """True if `count` is one of the numbers, of which there may be thousands."""
        place = bisect_left(self.counts, count)
        return place < len(self.counts) and self.counts[place] == count


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=64)
def solve_nodes(demand: Demand) -> Choice:
    """The batch for ranks in whole nodes that share models (version 0.2); counts are data-parallel ranks.

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
    # As in DeepSpeed, less than one node is no limit; the search still needs one.
    most = demand.most // demand.per_node or min(batch // min(demand.micro_batches), MOST_RANKS // demand.per_node or 1)
    of_nodes = replace(
        demand,
        max_batch=batch,
        least=demand.least // demand.per_node or 1,
        most=most,
        sharing=1,
        per_node=1,
    )
    choice = solve(of_nodes)
    return Choice(choice.batch * per_node, tuple(per_node * count for count in choice.counts))


def solve_here(demand: Demand, ranks: int) -> Choice:
    """As `solve_nodes`; if `ranks` is none of its numbers, the greatest batch for these ranks alone.

    Raises:
        ElasticityIncompatibleWorldSize: `ranks` are no whole nodes, or too many for the batch.
        ElasticityError: as `solve_nodes`.
    """
    choice = solve_nodes(demand)
    if ranks % demand.sharing == 0 and choice.has(ranks // demand.sharing):
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
    """All numbers of ranks in the range that divide the batch into whole micro-batches."""
    primes = _prime_factors(batch, demand.most)
    cuts = {batch // micro for micro in demand.micro_batches if batch % micro == 0}
    found = {count for cut in cuts for count in _divisors(cut, primes, demand.most)}
    return tuple(sorted(count for count in found if count >= demand.least))


def _prime_factors(number: int, most: int) -> list[int]:
    """The prime factors of a number that are not greater than `most`."""
    found, factor = [], 2
    while factor <= most and factor * factor <= number:
        if number % factor == 0:
            found.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return [*found, number] if 1 < number <= most else found


def _divisors(number: int, primes: Iterable[int], most: int) -> list[int]:
    """The divisors up to `most`; `primes` are all prime factors up to there, and may be some others."""
    found = [1]
    for prime in primes:
        before, power = list(found), prime
        while power <= most and number % power == 0:
            found += [divisor * power for divisor in before if divisor * power <= most]
            power *= prime
    return found


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
