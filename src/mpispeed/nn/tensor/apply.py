"""Replacement of the layers of one site in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor import regions
from mpispeed.nn.tensor.carried import carried
from mpispeed.nn.tensor.dropout import Region, SplitDropout, give_own_stream, has_dropout
from mpispeed.nn.tensor.entry import Entry, SequenceCut
from mpispeed.nn.tensor.linear import ColumnLinear, CutLayer, RowLinear
from mpispeed.nn.tensor.shard_plan import Column, Narrowed, Site, join, known_shape
from mpispeed.nn.tensor.tensor_cut import marks_of


class Layers(Protocol):
    """Gives the layers of a model that is to be sliced."""

    def has(self, tensor: torch.Tensor) -> bool:
        """True if this rank has the values of a parameter or buffer."""

    def copied(self, module: nn.Module) -> nn.Module:
        """A copy to be tried out; parameters whose values this rank does not have are random, alike in all copies."""

    def replaced(self, old: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        """The sliced form of a layer; `make` makes it of the full parameters of `old`."""


class _AtHand:
    """Layers whose full parameters are on this rank."""

    def has(self, tensor: torch.Tensor) -> bool:
        return True

    def copied(self, module: nn.Module) -> nn.Module:
        return copy.deepcopy(module)

    def replaced(self, old: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
        return make()


AT_HAND = _AtHand()


def apply_site(
    model: nn.Module, site: Site, comm: Comm, sequence: SequenceCut | None = None, layers: Layers = AT_HAND
) -> None:
    """Slice the layers of a site, adjust its module's numbers of heads, and give its dropouts their streams.

    Local, unless full parameters are elsewhere: only the layers' own forward communicates.

    Args:
        model: changed in place.
        site: with paths in it.
        comm: the slicing group.
        sequence: given where activations are sliced by sequence between sites.
        layers: gives full parameters.
    """
    region = Region()
    is_attention = bool(site.heads)
    # With a sliced sequence, attention itself has to see full sequences, not only its layers.
    entry = Entry(comm, sequence, len(site.columns))
    is_entered_whole = is_attention and sequence is not None
    for column in site.columns:
        way = Entry.crossed(comm) if is_entered_whole else entry
        old = model.get_submodule(column.path)
        _replace(model, column.path, sliced(layers, old, partial(_column, model, column, site, comm, way)))
    holder: Any = model.get_submodule(site.holder)
    if is_entered_whole:
        holder.register_forward_pre_hook(WholeSequence(entry), with_kwargs=True)
    if site.row:
        old = model.get_submodule(site.row)
        _replace(model, site.row, sliced(layers, old, partial(_row, model, site, comm, sequence)))
    for name, values in site.attributes:
        setattr(holder, name, values[comm.rank])
    for narrowed in site.narrowed:
        _narrow(holder, narrowed, site, comm)
    for name in site.partial:
        owner, _, own = join(site.scope, name).rpartition(".")
        marks_of(model.get_submodule(owner)).partial.add(own)
    if sequence is None and site.row and site.columns:
        _streams(model, site, comm, holder, region)


def sliced(layers: Layers, old: nn.Module, make: Callable[[], CutLayer]) -> nn.Module:
    """The sliced form of a layer, with what that carries. Local, unless full parameters are elsewhere."""
    return layers.replaced(old, partial(carried, old, make))


def _column(model: nn.Module, column: Column, site: Site, comm: Comm, entry: Entry) -> ColumnLinear:
    old: Any = model.get_submodule(column.path)
    widths = known_shape(model, column.path)
    return ColumnLinear(
        widths.inputs,
        widths.outputs,
        comm,
        bias=getattr(old, "bias", None) is not None,
        sub_sizes=column.sub_sizes,
        grains=column.grains,
        gather_output=not site.row,
        transposed=widths.is_transposed,
        whole=old,
        entry=entry,
        ranges=column.ranges,
    )


def _row(model: nn.Module, site: Site, comm: Comm, sequence: SequenceCut | None) -> RowLinear:
    old: Any = model.get_submodule(site.row)
    widths = known_shape(model, site.row)
    bias = getattr(old, "bias", None) is not None
    options = {"grain": site.grain, "whole": old, "sequence": sequence, "bias": bias, "ranges": site.ranges}
    options |= {"input_is_whole": site.takes_whole}
    return RowLinear(widths.inputs, widths.outputs, comm, transposed=widths.is_transposed, **options)


def _streams(model: nn.Module, site: Site, comm: Comm, holder: nn.Module, region: Region) -> None:
    """Give dropouts between column- and row-parallel layers different masks on every rank."""
    is_own = site.row.rpartition(".")[0] != site.holder or bool(site.after) or not _dropouts(holder)
    if site.heads and is_own:
        if has_dropout(holder, site.after):
            give_own_stream(holder, comm.rank, site.after)
        return
    scope = model.get_submodule(site.scope)
    drops = _dropouts(scope)
    if not drops:
        return
    for column in site.columns:
        model.get_submodule(column.path).register_forward_hook(region.enter)
    model.get_submodule(site.row).register_forward_pre_hook(region.leave)
    scope.register_forward_pre_hook(region.leave)
    for path, dropout in drops.items():
        _replace(scope, path, SplitDropout(dropout, region, comm.rank))


def _dropouts(module: nn.Module) -> dict[str, nn.Dropout]:
    return {path: part for path, part in module.named_modules() if type(part) is nn.Dropout and part.p > 0}


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    parent: Any = model.get_submodule(owner)
    layer.train(parent._modules[name].training)
    parent._modules[name] = layer


class WholeSequence:
    """A hook before a module that gathers hidden states sliced by sequence."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments with full hidden states: the first one, or that of this name."""
        if args:
            return (self.entry(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.entry(kwargs["hidden_states"])}


def _narrow(holder: nn.Module, narrowed: Narrowed, site: Site, comm: Comm) -> None:
    module: nn.Module = holder.get_submodule(narrowed.module)
    start, stop = site.heads[comm.rank]
    if narrowed.argument:
        hook = OwnHeads(narrowed.argument, start, stop, site.heads[-1][1])
        module.register_forward_pre_hook(hook, with_kwargs=True)
    else:
        module.register_forward_hook(OwnBiases(start, stop, comm))


class OwnHeads:
    """A hook before a module that narrows a keyword argument [batch * heads, ...] to this rank's heads."""

    def __init__(self, argument: str, start: int, stop: int, heads: int) -> None:
        self.argument, self.start, self.stop, self.heads = argument, start, stop, heads

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments with this rank's heads."""
        whole = kwargs.get(self.argument)
        if whole is None:
            return args, kwargs
        own = whole.unflatten(0, (-1, self.heads))[:, self.start : self.stop].flatten(0, 1)
        return args, {**kwargs, self.argument: own}


class OwnBiases:
    """A hook behind a module that narrows its output [..., heads] to this rank's heads."""

    def __init__(self, start: int, stop: int, comm: Comm) -> None:
        self.start, self.stop, self.comm = start, stop, comm

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnBiases:
        return OwnBiases(self.start, self.stop, self.comm)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """The numbers of this rank's heads. Collective over: the slices, in backward."""
        return regions.copy_to(output, self.comm)[..., self.start : self.stop]
