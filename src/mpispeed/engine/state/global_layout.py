"""This rank's part in the logical tensors of a checkpoint: slices of layers, a stage, copies of shared parameters.

Pieces in swap files are read only as they are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import UsageError
from mpispeed.base.rng import get_rng_tracker
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, ParamInfo, Piece, persistent_buffers
from mpispeed.ckpt.slices import TensorSlice, gather_pieces, read_slice
from mpispeed.engine.cut_info import info_of_cut
from mpispeed.engine.state.expert_names import NO_EXPERTS, ExpertNames
from mpispeed.exchange.saved import Run
from mpispeed.nn.expert import RoutedExperts
from mpispeed.nn.tensor import cuts
from mpispeed.nn.tensor.tensor_cut import OWN
from mpispeed.optim.rule import KeepsState
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.placements import distinct_factor
from mpispeed.store.coded_tensor import WINDOW, CodedTensor
from mpispeed.store.layout import Span
from mpispeed.store.stored_tensor import STEP, MemoryTensor
from mpispeed.store.transfers import own_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.ckpt.read.reader import Checkpoint
    from mpispeed.engine.build.parts import Parts
    from mpispeed.exchange.saved import Saved
    from mpispeed.optim.rule import Window
    from mpispeed.sharding.update_windows import StateStore
    from mpispeed.store.layout import Place, Unit
    from mpispeed.store.stored_tensor import Lease, StoredTensor

T = TypeVar("T")

LAST = 1 << 30
"""Sort key of parameters that belong to no layer, such as those of the loss."""

_CUT_FIELDS = ("shape", "tp_kind", "tp_dim", "tp_sub_sizes", "tp_grains", "vocab_size")


@dataclass(frozen=True, slots=True)
class GlobalLayout:
    """This rank's part in the whole model.

    Attributes:
        parts: components of the engine.
        slices: parameters and buffers of which this rank has a slice, by name.
        experts: layers of experts, which may be on other data ranks.
    """

    parts: Parts
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)
    experts: ExpertNames = NO_EXPERTS

    @classmethod
    def of(cls, parts: Parts) -> GlobalLayout:
        """Read this rank's part off the model. Local."""
        layers = {name: one for name, one in parts.module.named_modules() if isinstance(one, RoutedExperts)}
        experts = ExpertNames.of(layers) if layers else NO_EXPERTS
        comm = parts.mesh["model"]
        if comm.size == 1:
            return cls(parts, experts=experts)
        named = {**dict(parts.module.named_parameters()), **dict(persistent_buffers(parts.module))}
        found = {}
        for name, cut in cuts(parts.module).items():
            if name in named:
                shape = experts.fused[name].shape(cut.shape) if name in experts.fused else cut.shape
                info = info_of_cut(name, shape, named[name].dtype, cut)
                found[name] = TensorSlice(info, comm.rank, comm.size)
        return cls(parts, found, experts)

    def describe(self, info: ParamInfo) -> ParamInfo:
        """`info` of a local parameter, completed by the attributes of the logical one."""
        cut, model = self.slices.get(info.name), self.parts.module
        if cut is not None:
            info = replace(info, **{name: getattr(cut.info, name) for name in _CUT_FIELDS})
        elif self.parts.mesh["model"].size > 1:
            info = replace(info, tp_kind="replicated")
        if isinstance(model, PipelineModule):
            kind = "replicated" if self._stages(info.name) else "owned"  # whatever the number of stages is
            info = replace(info, pp_layer=model.layer_of(info.name), pp_kind=kind)
        if info.name in self.experts.fused:
            info = replace(info, shape=self.experts.fused[info.name].shape(info.shape))
        return replace(info, expert=self.experts.expert(info.name))

    def shape(self, name: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Shape of the logical parameter or buffer of which this rank holds `tensor`."""
        return self.slices[name].info.shape if name in self.slices else self.whole_shape(name, tuple(tensor.shape))

    def whole_shape(self, name: str, own: tuple[int, ...]) -> tuple[int, ...]:
        """`own`, or the shape of the tensor of all experts that it is a part of."""
        return self.experts.fused[name].shape(own) if name in self.experts.fused else own

    # -- saving ------------------------------------------------------------------------------------------------------

    def pieces(
        self, unit: Unit, name: str, start: int, values: torch.Tensor | Deferred, *, before: int = 0
    ) -> tuple[Piece, ...]:
        """The pieces to save for a flat range of this rank's parameter in a unit.

        In a tensor with one row for each of several ranks, `before` is the number of elements in earlier rows.
        """
        start += self.before(name)
        made = gather_pieces(self.slices[name], start, values) if name in self.slices else [Piece(start, values)]
        if self.parts.sharing is not None and not self.parts.sharing.is_counted(unit):
            made = [replace(piece, is_replica=True) for piece in made]
        return tuple(replace(piece, start=piece.start + before) if before else piece for piece in made)

    def outside(self, name: str, slot: str, tensor: torch.Tensor) -> LogicalTensor:
        """A parameter or buffer that is in no unit; the first data rank that has it writes it."""
        mesh, cut = self.parts.mesh, self.slices.get(name)
        pieces: Iterable[Piece] = ()
        if self.is_writer(name, tensor) and self._owns(name):
            flat = tensor.detach().contiguous().reshape(-1).cpu()
            if cut is not None:
                pieces = gather_pieces(cut, self.before(name), flat)
            elif mesh.index("model") == 0:
                pieces = (Piece(self.before(name), flat),)
        return LogicalTensor(name, slot, self.shape(name, tensor), tensor.dtype, tuple(pieces))

    def is_writer(self, name: str, tensor: torch.Tensor) -> bool:
        """True on the first of the data ranks that have copies of a parameter or buffer."""
        copies = distinct_factor(distinct_over(tensor)).rest if self.experts.differ(name) else "data"
        return self.parts.mesh.index(str(copies)) == 0

    def before(self, name: str) -> int:
        """Elements of a logical parameter, or of this rank's slice of it, before those of this rank's experts."""
        fused = self.experts.fused.get(name)
        return 0 if fused is None else fused.held.start * fused.each

    def _stages(self, name: str) -> Sequence[int]:
        model, words = self.parts.module, name.split(".")
        if isinstance(model, PipelineModule) and words[0] == "tied_modules":
            return model.tied(words[1]).stages
        return ()

    def is_first(self, name: str) -> bool:
        """True unless an earlier stage or slice has the same parameter or buffer, whose values count."""
        is_copy = self.slices[name].is_copy if name in self.slices else self.parts.mesh.index("model") > 0
        return self._owns(name) and not is_copy

    def _owns(self, name: str) -> bool:
        stages = self._stages(name)
        return not stages or stages[0] == self.parts.mesh.index("pipe")

    # -- over stages -------------------------------------------------------------------------------------------------

    def over_stages(self, items: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Named items of all stages in the order of layers, each name once, from the first stage that has it.

        Collective over: the pipe axis.
        """
        model, own = self.parts.module, list(items)
        if not isinstance(model, PipelineModule):
            return own
        placed = []
        for position, (name, item) in enumerate(own):
            layer = model.layer_of(name)
            placed.append((layer if layer >= 0 else LAST, self.parts.mesh.index("pipe"), position, name, item))
        everyone = self.parts.mesh["pipe"].gather_objects(placed)
        found: dict[str, tuple[str, T]] = {}
        for *_, name, item in sorted((row for rows in everyone for row in rows), key=lambda row: row[:3]):
            found.setdefault(name, (name, item))
        return list(found.values())

    def expanded(self, items: Iterable[tuple[str, T]], like: Callable[[str, T], T]) -> Iterable[tuple[str, T]]:
        """As `ExpertNames.expanded`."""
        return self.experts.expanded(items, like) if self.experts.numbered else items

    def names(self, own: Iterable[str]) -> list[str]:
        """Names of this rank's parameters and of experts on other data ranks, in the order of the whole model."""
        return [name for name, _ in self.expanded(((name, None) for name in own), lambda _, item: item)]

    def infos(self, own: Iterable[ParamInfo]) -> list[ParamInfo]:
        """Descriptions of the parameters of all stages and experts. Collective over: the pipe axis."""
        described = ((info.name, self.describe(info)) for info in own)
        everyone = self.expanded(
            described, lambda name, info: replace(info, name=name, expert=self.experts.expert(name))
        )
        return [info for _, info in self.over_stages(everyone)]

    def tensors(self, own: Iterable[LogicalTensor]) -> list[LogicalTensor]:
        """Tensors of all stages and experts, those of others without pieces. Collective over: the pipe axis."""
        everyone = self.expanded(
            ((tensor.name, tensor) for tensor in own), lambda name, tensor: replace(tensor, name=name, pieces=())
        )
        here = {(tensor.name, tensor.slot): tensor for _, tensor in everyone}
        if not isinstance(self.parts.module, PipelineModule):
            return list(here.values())
        slots: dict[str, list[Any]] = {}
        for tensor in here.values():
            slots.setdefault(tensor.name, []).append((tensor.slot, tensor.shape, tensor.dtype))
        found = []
        for name, rows in self.over_stages(slots.items()):
            found += [here.get((name, row[0])) or LogicalTensor(name, *row) for row in rows]
        return found

    def names_by_group(self, own: Sequence[Sequence[str]]) -> list[list[str]]:
        """Names of all stages and experts by parameter group. Collective over: the pipe axis."""
        flat = [(name, index) for index, names in enumerate(own) for name in names]
        if self.experts.are_shared_out:  # units of experts are apart: in the order of the model whatever the ranks are
            groups = dict(self.expanded(flat, lambda _, index: index))
            order = self.names(name for name, _ in self.parts.module.named_parameters())
            flat = [(name, groups[name]) for name in order if name in groups]
        members: list[list[str]] = [[] for _ in own]
        for name, index in self.over_stages(flat):
            members[index].append(name)
        return members

    # -- loading -----------------------------------------------------------------------------------------------------

    def misfit(self, source: Checkpoint) -> str:
        """The reason why stored slices do not fit layers that the model's own code slices, or ""."""
        own = dict(self.parts.module.named_parameters())  # other stages check theirs
        for name in sorted(own.keys() & set(source.names())):
            stored, here = source.info(name), self.slices[name].info if name in self.slices else None
            cuts_of = [
                (info.shape, info.tp_sub_sizes) if info is not None and info.tp_kind == OWN else None
                for info in (stored, here)
            ]
            if cuts_of[0] != cuts_of[1]:
                had, has = (f"{len(cut[1])} pieces of {cut[0]}" if cut else "one whole" for cut in cuts_of)
                return (
                    f"parameter {name} is {had} in {source.path} and {has} in the model, of a layer that the model "
                    "cuts by its own code; only that code knows how other pieces are made: load with the mpu and the "
                    "number of ranks for a layer as when it was saved"
                )
        return ""

    def read(
        self, source: Checkpoint, name: str, slot: str, start: int, out: torch.Tensor, *, row: int | None = None
    ) -> None:
        """Fill `out` with a flat range, from `start`, of this rank's part of a parameter or buffer.

        `row` selects the row of a stored tensor that has one for each of several ranks.
        """
        if name in self.slices:
            read_slice(source, name, slot, self.slices[name], self.before(name) + start, out, row=row)
        else:
            before = 0 if row is None else row * math.prod(source.stored(name, slot).shape[1:])
            source.read(name, slot, before + self.before(name) + start, out)


def require_common(module: nn.Module, reason: str, layout: GlobalLayout | None = None) -> None:
    """Require that data ranks have all parameters in common, with a `layout` but experts.

    Args:
        module: the model.
        reason: a clause of the message.
        layout: of a caller that can tell experts apart.

    Raises:
        UsageError: on every rank of the data axis, if they have some of their own.
    """
    problem = _find_apart(module, reason, None if layout is None else layout.experts)
    if problem:
        raise UsageError(problem)


def require_named(parts: Parts, layout: GlobalLayout) -> None:
    """Require a name of its own for each parameter: data ranks have all in common but numbered experts.

    Collective over: all ranks; stages have different parameters.

    Raises:
        UsageError: on every rank.
    """
    if not parts.plan.placing.distinct:
        return
    problem = _find_apart(parts.module, "a checkpoint has one tensor for each name", layout.experts)
    parts.mesh.world.comm.agree(not problem, problem, UsageError)


def _find_apart(module: nn.Module, reason: str, experts: ExpertNames | None = None) -> str:
    """A message on a parameter that data ranks do not have in common, these experts apart; else ""."""
    names = [name for name, param in module.named_parameters() if distinct_over(param) > 1]
    apart = next((name for name in names if experts is None or not experts.differ(name)), None)
    if apart is None:
        return ""
    return (
        f"parameter {apart!r} has values of its own on each of several data ranks (mark_distinct), and {reason}; "
        "experts that are shared out over ranks are in checkpoints and in state dicts that are loaded without a "
        "custom_load_fn; other weights of this kind are to be saved and loaded by your own code, rank by rank"
    )


def named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, None]]:
    """The names alone, for `GlobalLayout.over_stages`."""
    return ((name, None) for name, _ in tensors)


def names_by_group(parts: Parts) -> list[list[str]]:
    """Parameter names of each group of the optimizer."""
    names = {id(param): name for name, param in parts.module.named_parameters()}
    members: list[list[str]] = [[] for _ in (parts.optimization.groups if parts.optimization else ())]
    for param, place in parts.table.places():
        members[place.entry.group].append(names[id(param)])
    return members


def slice_streams() -> dict[str, bytes]:
    """States of the random streams that differ between the slices of a layer, by "stream.kind"."""
    states = get_rng_tracker().get_states().items()
    return {f"{name}.{kind}": bytes(value.numpy()) for name, state in states for kind, value in state.items()}


# -- tensors to save -----------------------------------------------------------------------------------------------


def exchanging_run(parts: Parts, whole: GlobalLayout) -> Run:
    """The run, for the part of a checkpoint that belongs to the exchange."""
    sharing = parts.sharing
    copies = sharing.summed_over if sharing is not None else lambda _: ()
    return Run(whole, parts.counters.pending_backwards, parts.scaler.scale, copies)


def tensors_of(
    parts: Parts,
    whole: GlobalLayout,
    windows: Sequence[Window],
    slots: Mapping[str, Collection[str]],
    *,
    has_frozen: bool,
    more: Saved | None = None,
) -> Iterator[LogicalTensor]:
    """All tensors of this stage, in the same order on all its ranks. Nothing is read from swap files yet.

    Args:
        parts: components of the engine.
        whole: this rank's part in the whole model.
        windows: windows of the next update, for rules that keep their own state.
        slots: names of the optimizer states of each parameter.
        has_frozen: include frozen parameters.
        more: additional tensors, of the exchange.
    """
    kept, cuts = _kept_slots(parts, whole, windows), _Cuts(parts)
    stores = parts.features.slots(parts.counters.applied_steps)
    frozen = {unit.index: _rest(parts, unit) for unit in parts.table.frozen} if has_frozen else {}
    for name, param in parts.module.named_parameters():
        place, shape = parts.table.locate(param), whole.shape(name, param)
        if place is not None and place.unit.is_trainable:
            dtype = place.unit.states.full
            for slot, holder in _trained(parts, place.unit, sorted(slots.get(name, ())), stores).items():
                mean = None if more is None else more.mean(place, slot)
                if mean is not None:
                    pieces: Sequence[Piece] = mean
                else:
                    pieces = (
                        kept.get((name, slot), ()) if holder is None else _pieces(parts, whole, place, holder, cuts)
                    )
                yield LogicalTensor(name, slot, shape, dtype, pieces)
            if more is not None:
                yield from more.tensors(place, shape)
        elif place is not None and place.unit.index in frozen:
            # Frozen parameters of a unit are sharded too: every rank writes its part.
            pieces = _pieces(parts, whole, place, frozen[place.unit.index], cuts)
            yield LogicalTensor(name, "weight16", shape, place.unit.states.compute, pieces)
        elif has_frozen:
            yield whole.outside(name, "weight16", param)
    for name, buffer in persistent_buffers(parts.module):
        yield whole.outside(name, "buffer", buffer)


def _trained(
    parts: Parts, unit: Unit, slots: Sequence[str], stores: Sequence[StateStore]
) -> Mapping[str, StoredTensor | None]:
    """Slot -> stored tensor of a trained unit, those of features last; None for slots kept by the rule."""
    holders = {} if parts.optimization is None else parts.optimization.states.tensors(unit)
    found = {"master": parts.params.shards.stored_master(unit), **{slot: holders.get(slot) for slot in slots}}
    for store in stores:
        found |= store.tensors(unit)
    return found


def _kept_slots(parts: Parts, whole: GlobalLayout, windows: Sequence[Window]) -> dict[tuple[str, str], list[Piece]]:
    """(parameter, slot) -> this rank's pieces, for a rule that keeps its own state."""
    found: dict[tuple[str, str], list[Piece]] = {}
    rule = parts.optimization.rule if parts.optimization else None
    if not isinstance(rule, KeepsState):
        return found
    for window in windows:
        unit = parts.table.units[window.key[0]]
        span = Span(window.key[2], window.key[2] + window.master.numel())
        for slot, tensor in rule.slots(window.key).items():
            for entry, common in unit.layout.overlaps(span.intersect(_share(parts, unit))):
                local = common.shifted(-span.start).slice
                pieces = whole.pieces(unit, entry.name, common.start - entry.offset, tensor.reshape(-1)[local].cpu())
                found.setdefault((entry.name, slot), []).extend(pieces)
    return found


def _rest(parts: Parts, unit: Unit) -> StoredTensor:
    """This rank's shard of a unit's parameters; dequantized if it is in memory."""
    holder = parts.params.shards.stored_shard(unit)
    return holder if holder.is_swapped else MemoryTensor(parts.params.shards.rest(unit))


def _share(parts: Parts, unit: Unit) -> Span:
    """The range this rank writes: its masters divided among their replicas, so that all ranks write equal parts."""
    return own_share(parts.mesh, unit.states.master, unit.layout.padded, unit.states.partial)


class _Cuts:
    """Cache of (range this rank writes, range it holds) by unit, as every tensor asks for it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[int, tuple[Span, Span]] = {}

    def of(self, unit: Unit) -> tuple[Span, Span]:
        if unit.index not in self._known:
            params = self._parts.params
            held = params.shards.span(unit) if unit.is_trainable else params.shards.rest_span(unit)
            self._known[unit.index] = _share(self._parts, unit), held
        return self._known[unit.index]


def _pieces(parts: Parts, whole: GlobalLayout, place: Place, holder: StoredTensor, cuts: _Cuts) -> tuple[Piece, ...]:
    """This rank's pieces of a parameter; `holder` has the range of the unit that this rank holds."""
    share, held = cuts.of(place.unit)
    common = place.entry.span.intersect(share)
    if not common.numel:
        return ()
    local = common.shifted(-held.start)
    is_later = holder.is_swapped or isinstance(holder, CodedTensor)
    values = _later(parts, holder, local) if is_later else holder.get()[local.slice].cpu()
    return whole.pieces(place.unit, place.entry.name, common.start - place.entry.offset, values)


def _later(parts: Parts, holder: StoredTensor, span: Span) -> Deferred:
    length = parts.params.tiers.plan.window_elements
    if isinstance(holder, CodedTensor):
        length = WINDOW if not holder.is_swapped else min(WINDOW, length)

    def read(first: int, last: int) -> Iterator[torch.Tensor]:
        return read_parts(holder, Span(span.start + first, span.start + last), length)

    return Deferred(span.numel, holder.dtype, read, is_in_memory=not holder.is_swapped)


def read_parts(holder: StoredTensor, span: Span, length: int) -> Iterator[torch.Tensor]:
    """Read the range `span` of a stored tensor in order; the next part is read while one is used.

    Args:
        holder: the tensor, in memory or in a swap file.
        span: range of elements.
        length: elements per buffer, a multiple of `STEP`.

    Yields:
        Flat tensors, each valid until the next is requested.

    Raises:
        StoreError: the file could not be read.
    """
    # Leases begin at a page: elements of the first part before the range are left out.
    starts = range(span.start // STEP * STEP, span.stop, length) if span.numel else ()
    ahead: Lease | None = None
    for start in starts:
        lease = ahead or holder.lend(start, min(start + length, span.stop))
        following, ahead = start + length, None
        try:
            if following < span.stop:
                ahead = holder.lend(following, min(following + length, span.stop))
            yield lease.wait()[max(span.start - start, 0) :]
        except BaseException:
            if ahead is not None:
                ahead.give_back(changed=False)
            raise
        finally:
            lease.give_back(changed=False)
