"""Structured sparse pruning in a run: `sparse_pruning` with the method snip_momentum.

Every applied step adds to the scores of this rank's ranges of the masters; no rank talks to another for that. After
steps that the ramp names, scores of whole weights are gathered, one unit at a time, and a threshold over all layers is
found by counting. So masks have the same bits at every ZeRO stage.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.units import format_list
from mpispeed.nn.compression.blocks import DECAY, Pattern, Ramp, rank_at, ranks_of
from mpispeed.nn.compression.layers import state_of
from mpispeed.nn.compression.matching import out_dim_of
from mpispeed.nn.compression.techniques import Group, Pruning
from mpispeed.sharding.master_edits import read_gradients
from mpispeed.sharding.update_windows import StateStore
from mpispeed.store.placement import REPLICATED
from mpispeed.store.transfers import all_gather_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from mpispeed.engine.hooks import Context
    from mpispeed.engine.step import StepContext
    from mpispeed.nn.compression.model import Compression
    from mpispeed.store.layout import Entry, Span, Unit

log = logging.getLogger(__name__)

SLOT = "pruning_score"
"""Name of the scores in checkpoints, beside the optimizer's states."""

_METHOD = "snip_momentum"
_SHARED = "compression_training.sparse_pruning.shared_parameters"
_NAMES_SHOWN = 5
_PIECE = 1 << 22
"""Elements that are worked on at once, to bound what is in between."""


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that is pruned."""

    unit: Unit
    entry: Entry
    mask: torch.Tensor  # bool, as the weight
    out_dim: int

    def kept(self, pattern: Pattern) -> torch.Tensor:
        """The mask by groups. Shapes: [groups, weights]."""
        return pattern.grouped(self.mask, self.out_dim)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The layers of one group of the config, under one threshold."""

    name: str
    ramp: Ramp
    pattern: Pattern
    targets: list[Target]

    def by_unit(self) -> Iterator[tuple[Unit, list[Target]]]:
        """The weights of each unit, in the order of units."""
        for index in sorted({target.unit.index for target in self.targets}):
            own = [target for target in self.targets if target.unit.index == index]
            yield own[0].unit, own


@dataclass(slots=True)
class _Choice:
    """Groups of one weight while the threshold is looked for.

    Shapes: ranks [groups]; doomed, the weights that go with their group, [groups, weights] or [1, 1].
    """

    target: Target
    ranks: torch.Tensor
    doomed: torch.Tensor

    @classmethod
    def of(cls, pattern: Pattern, target: Target, scores: torch.Tensor) -> _Choice:
        """Look at the scores of one weight. Shapes: scores [elements]."""
        grouped = pattern.grouped(scores.view(target.entry.shape), target.out_dim)
        doomed = pattern.doomed(grouped)
        is_gone = ~target.kept(pattern).all(1).to(scores.device)
        salt = zlib.crc32(target.entry.name.encode())
        total = torch.where(doomed, grouped, 0).sum(1)
        return cls(target, ranks_of(total, is_gone, salt, pattern.most_groups), doomed)

    def prune(self, pattern: Pattern, last: int) -> None:
        """Take away the groups up to a rank; those that are gone lose nothing more."""
        kept = self.target.kept(pattern)
        goes = (self.ranks <= last).to(kept.device) & kept.all(1)
        kept = kept & ~(self.doomed.to(kept.device) & goes.unsqueeze(1))
        self.target.mask.copy_(pattern.ungrouped(kept, self.target.entry.shape, self.target.out_dim))


def attach(context: Context, compression: Compression) -> BlockPruning | None:
    """Prune the layers of groups with this method; None without any.

    Collective over: the pipe axis.

    Raises:
        ConfigError: no layer fits, the pattern cannot become so sparse, or ranks do not have the mean of gradients.
    """
    optimization = context.parts.optimization
    groups = [group for group in compression.groups if _is_ours(group)]
    if not groups or optimization is None:
        return None
    if optimization.exchange.is_phased:
        msg = (
            f"{_SHARED}.method: snip_momentum needs the mean of all ranks' gradients at every step, which the "
            f"optimizer {optimization.rule.name} does not have; take another optimizer, or the method l1 or topk"
        )
        raise ConfigError(msg)
    return BlockPruning(context, [_pruned(context, group) for group in groups])


def _is_ours(group: Group) -> bool:
    return isinstance(group.technique, Pruning) and group.technique.scores == _METHOD


def _pruned(context: Context, group: Group) -> Pruned:
    """Collective over: the pipe axis."""
    technique = cast("Pruning", group.technique)
    pattern, last = Pattern.parse(technique.block_pattern), technique.offset_end
    last = technique.offset if last is None else last
    least = 1 - pattern.most
    if Fraction(repr(technique.dense_ratio)) < least:
        msg = (
            f"{_SHARED}.block_pattern: {pattern.text} takes away at most {float(pattern.most):g} of the weights, and "
            f"dense_ratio is {technique.dense_ratio:g}; make that at least {float(least):g}"
        )
        raise ConfigError(msg)
    targets, unfit = [], []
    for name, layer in context.module.named_modules():
        state = state_of(layer)
        if state is not None and state.techniques.get(technique.method) is technique:
            target = _target(context, layer)
            if target is not None and pattern.fits(target.entry.shape, target.out_dim):
                targets.append(target)
            else:
                unfit.append(name)
    everywhere = [*zip(*context.mesh["pipe"].gather_objects((len(targets), unfit)), strict=True)]
    names = [name for stage in everywhere[1] for name in stage]
    told = (
        f"{group.path}: the weights of {format_list(names, _NAMES_SHOWN)} are frozen, or no tiles of block_pattern "
        f"{pattern.text} (outputs x inputs)"
    )
    if not sum(everywhere[0]):
        msg = f"{told}; nothing is left to prune: choose another pattern, or other modules"
        raise ConfigError(msg)
    if names and context.mesh.rank == 0:
        log.warning("%s; they stay as they are", told)
    ramp = Ramp(technique.dense_ratio, max(technique.offset, 1), max(last, 1), technique.stride)
    return Pruned(group.name, ramp, pattern, targets)


def _target(context: Context, layer: nn.Module) -> Target | None:
    """The weight of a layer; None if it is not trained."""
    weight = layer._parameters["weight"]
    place = None if weight is None else context.params.table.find(weight)
    if place is None:
        return None
    return Target(place.unit, place.entry, cast("torch.Tensor", layer._buffers["sparse_mask"]), out_dim_of(layer))


class BlockPruning:
    """Part of a step that adds up scores, and prunes after steps that are due."""

    def __init__(self, context: Context, groups: list[Pruned]) -> None:
        self._context, self._groups = context, groups
        self._shards, self._grads = context.params.shards, context.parts.optimization.grads.shards
        self._last = max(group.ramp.end for group in groups)
        self._units = {unit.index: unit for group in groups for unit, _ in group.by_unit()}
        self._scores: StateStore | None = None

    def slots(self, updates: int) -> StateStore | None:
        """The scores, until the last pruning; they begin at zero. Local."""
        if updates >= self._last:
            self._scores = None
        elif self._scores is None:
            table, tiers = self._shards.table, self._shards.tiers
            self._scores = StateStore(table, self._shards, (SLOT,), tiers, lambda unit: unit.index in self._units)
        return self._scores

    def tell_late(self) -> None:
        """Warn of groups whose last pruning should have been before the update at which the run goes on. Local."""
        step = self._context.counters.applied_steps
        late = [group.name for group in self._groups if group.ramp.end <= step]
        if late and self._context.mesh.rank == 0:
            log.warning(
                "%s.schedule_offset_end: the run goes on after update %d, from a checkpoint without compression; no "
                "weight of the groups %s will be pruned, choose later steps", _SHARED, step, ", ".join(late),
            )  # fmt: skip

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: all ranks at steps that are due, and if states are in swap files; else local.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read.
        """
        step = self._context.counters.applied_steps + 1
        if ctx.skip or self.slots(step - 1) is None:
            return
        read_gradients(self._shards, self._grads, self._units.values(), partial(self._add, ctx.multiplier))
        for group in self._groups:
            if group.ramp.is_due(step):
                self._prune(group, step)

    def _add(self, multiplier: float, unit: Unit, span: Span, masters: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add to the scores of a range. One operation at a time, so that no cut changes how it is rounded."""
        parts = (each.split(_PIECE) for each in (self._own(unit)[span.slice], masters, gradients))
        for scores, weights, slopes in zip(*parts, strict=True):
            seen = (weights * slopes.to(weights.dtype)).abs_().mul_(multiplier)
            scores.mul_(DECAY).add_(seen)

    def _own(self, unit: Unit) -> torch.Tensor:
        return cast("StateStore", self._scores).of(unit)[SLOT]

    def _prune(self, group: Pruned, step: int) -> None:
        """Collective over: all ranks."""
        mesh, choices, counted = self._context.mesh, list[_Choice](), list[torch.Tensor]()
        sharing = self._context.parts.sharing
        for unit, targets in group.by_unit():
            scores, partial_over = self._whole(unit), mesh[unit.states.partial]
            for target in targets:
                choice = _Choice.of(group.pattern, target, scores[target.entry.span.slice])
                choices.append(choice)
                if sharing is None or sharing.is_counted(unit):
                    counted.append(choice.ranks[partial_over.rank :: partial_over.size])
        sparsity, everyone = group.ramp.sparsity(step), mesh[mesh.topology.names]
        last = rank_at(counted, sparsity / group.pattern.most, everyone.all_reduce)
        for choice in choices:
            choice.prune(group.pattern, last)
        if self._context.parts.buffers is not None:
            self._context.parts.buffers.look()  # masks are equal on all ranks
        if mesh.rank == 0:
            log.info("step %d: %.3g of the weights of group %s are pruned", step, float(sparsity), group.name)

    def _whole(self, unit: Unit) -> torch.Tensor:
        """Scores of a whole unit. Shapes: [padded]. Collective over: the axes over which its masters are sharded."""
        own, placement, padded = self._own(unit), unit.states.master, unit.layout.padded
        if placement.is_replicated:
            return own
        whole = torch.empty(padded, dtype=own.dtype, device=own.device)
        all_gather_into(self._context.mesh, whole, own, placement, REPLICATED, padded)
        return whole
