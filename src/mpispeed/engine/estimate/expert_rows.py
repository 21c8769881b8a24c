"""Rows of tokens that one rank sends to experts on other ranks and back, if all experts get equally many.

Routes of a run send them, over a mesh on which nothing moves.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from mpispeed.exchange.cost import Sent
from mpispeed.nn.expert import RoutedExperts, Router
from mpispeed.nn.expert.dispatch import follow
from mpispeed.nn.expert.sorted_plan import capacity_of
from mpispeed.store.dry import META

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.collectives.group import Record
    from mpispeed.mesh.mesh import Mesh

ROWS, COUNTS = "rows to experts and back", "counts of rows"


def balanced_counts(gate: Router, tokens: int) -> list[int]:
    """Rows for each expert of so many tokens whose experts are chosen in turn, within capacities."""
    options, experts = gate.options, gate.num_experts
    each, more = divmod(tokens * options.k, experts)
    counts = [each + (number < more) for number in range(experts)]
    if options.capacity_factor is None:
        return counts
    capacity = capacity_of(tokens, experts, options.capacity_factor * options.k, options.min_capacity)
    return [min(count, capacity) for count in counts]


def expert_rows(model: nn.Module, mesh: Mesh, tokens: int, dtype: torch.dtype, micro_steps: int) -> list[Sent]:
    """Traffic of layers of experts in one optimizer step, in forward and backward; nothing is recomputed.

    Args:
        model: with layers whose experts are shared out over `mesh`.
        mesh: a dry one.
        tokens: of one micro-batch on each rank.
        dtype: of rows.
        micro_steps: micro-batches of a step.
    """
    total: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedExperts) and layer.dispatcher is not None]
    for layer in layers:
        noted: list[Record] = []
        end = mesh.comm_trace.subscribe(noted.append)
        counts = torch.tensor(balanced_counts(layer.gate, len(layer.own_tokens(tokens))), device="cpu")
        layer.dispatcher.deal(counts)  # type: ignore[union-attr]  # what it hears on a dry mesh means nothing
        once = len(noted)
        route = layer.dispatcher.balanced(counts.tolist())  # type: ignore[union-attr]
        if route is not None:
            rows = torch.empty(int(counts.sum()), layer.gate.hidden_size, dtype=dtype, device=META)
            follow((*route.there, *route.back), rows)
        end()
        for place, record in enumerate(noted):
            what, ways = (COUNTS, 1) if place < once else (ROWS, 2)  # gradients of rows take both ways again
            total[what, record.verb, record.axes] += ways * micro_steps * record.sent_bytes
    return [Sent(*key, count) for key, count in total.items() if count]
