"""Units: parameters that are unsharded, reduced and updated together."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mpispeed.store.layout import FlatLayout, Table, Unit


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter in a place where some ranks have fewer than others, and what all have to agree on.

    Attributes:
        key: parameters with the same key stay in one unit, if one block has them or all blocks are in the module of
            this name.
        largest: elements of the tensors that the rank with most of them has in the place of this one.
    """

    key: str
    largest: tuple[int, ...]


Ties = Mapping[int, Tie]
"""By `id` of the parameter; others are alike on all ranks."""


def plan_units(
    model: nn.Module,
    group_of: Mapping[int, int],
    parts: int,
    limit_elements: int,
    *,
    merge_elements: int = 0,
    takes_frozen: bool = False,
    kind_of: Mapping[int, Hashable] | None = None,
    ties: Ties | None = None,
) -> Table:
    """Group the parameters of `model` into units.

    A unit is a run of parameters, in registration order, that belong to the same block: a child of the
    outermost `ModuleList` or `Sequential` on their path. Parameters outside of any such list (embeddings,
    heads) form units between the blocks, one for each child of the model. A unit holds one dtype and, unless a
    single parameter is larger, at most `limit_elements`. Neighbouring runs that are small together form one unit.

    Args:
        model: its parameters are grouped, none is changed.
        group_of: parameter group index by `id` of the parameter; the others are frozen.
        parts: number of equal shards of each unit's flat buffer.
        limit_elements: largest unit of several parameters.
        merge_elements: neighbouring runs with at most so many elements together become one unit.
        takes_frozen: make units of frozen parameters too.
        kind_of: kind by `id` of the parameter, None by default; a unit holds one kind. The
            parameters of a block that are of one kind follow each other.
        ties: of parameters of which ranks have different numbers. Units are as many and as long on all ranks.
    """
    kinds, ties = kind_of or {}, ties or {}
    blocks = block_names(model)
    named = list(model.named_parameters())
    trained = [(name, param) for name, param in named if id(param) in group_of]
    frozen = [(name, param) for name, param in named if id(param) not in group_of] if takes_frozen else []
    units: list[Unit] = []
    for items, is_trainable in ((trained, True), (frozen, False)):
        runs = _runs(items, blocks, limit_elements, kinds, ties)
        for part in _merged(runs, min(merge_elements, limit_elements), kinds, ties):
            tensors = [(name, tuple(param.shape), group_of.get(id(param), 0)) for name, param in part]
            largest = [count for _, param in part for count in _largest(param, ties)] if ties else ()
            layout = FlatLayout(tensors, parts, largest)
            by_name = dict(part)
            params = tuple(by_name[entry.name] for entry in layout.entries)
            title = _block_of(part[0][0], blocks)
            name = title if title in blocks else part[0][0]
            kind = kinds.get(id(params[0]))
            units.append(Unit(len(units), name, layout, params, part[0][1].dtype, is_trainable, kind))
    count = sum(unit.is_trainable for unit in units)
    return Table(tuple(units[:count]), aliases=tied_names(model), frozen=tuple(units[count:]))


def choose_resident(table: Table, unit_elements: int, all_elements: int) -> set[int]:
    """Persistent units, never sharded: small ones, in order, as long as their sum allows it.

    Args:
        table: the units.
        unit_elements: largest persistent unit.
        all_elements: limit of the elements of all persistent units.
    """
    chosen: set[int] = set()
    total = 0
    for unit in table.all_units:
        size = unit.layout.reckoned
        if size <= unit_elements and total + size <= all_elements:
            chosen.add(unit.index)
            total += size
    return chosen


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, each with the canonical (first) name."""
    canonical = {id(param): name for name, param in model.named_parameters()}
    return {
        name: canonical[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if canonical[id(param)] != name
    }


def block_names(model: nn.Module) -> set[str]:
    """Names of the children of every outermost `ModuleList` or `Sequential`, and of tiles, also inside of those.

    A module whose attribute `tile_depth` is positive, such as `nn.TiledLinear`, has tiles so many levels below it.
    """
    prefixes: set[str] = set()
    tiles: set[str] = set()
    for name, module in model.named_modules():
        depth = getattr(module, "tile_depth", 0)
        if depth:
            start = f"{name}." if name else ""
            tiles.update(
                start + inner for inner, _ in module.named_modules() if inner and inner.count(".") + 1 == depth
            )
        inside = any(name == p or name.startswith(p + ".") for p in prefixes)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            prefixes.update(f"{name}.{child}" if name else child for child, _ in module.named_children())
    return prefixes | tiles


def _block_of(name: str, blocks: set[str]) -> str:
    """The block of a parameter, or the child of the model that it belongs to."""
    path = name.split(".")
    for length in range(len(path) - 1, 0, -1):  # a tile goes before the block that it is in
        prefix = ".".join(path[:length])
        if prefix in blocks:
            return prefix
    return path[0] if len(path) > 1 else ""


Named = tuple[str, nn.Parameter]


def _largest(param: nn.Parameter, ties: Ties) -> tuple[int, ...]:
    tie = ties.get(id(param))
    return (param.numel(),) if tie is None else tie.largest


def _size(items: Iterable[Named], ties: Ties) -> int:
    """Elements that count for limits, the same on all ranks."""
    return sum(sum(_largest(param, ties)) for _, param in items)


def _runs(
    items: list[Named], blocks: set[str], limit: int, kinds: Mapping[int, Hashable], ties: Ties
) -> Iterator[list[Named]]:
    """Neighbours of one block, dtype and kind, split so that each run keeps to `limit`."""

    def block_of(item: Named) -> str:
        block, tie = _block_of(item[0], blocks), ties.get(id(item[1]))
        return tie.key if tie is not None and block.startswith(f"{tie.key}.") else block

    for _, block in itertools.groupby(items, key=block_of):
        sorts: dict[tuple[torch.dtype, Hashable], list[Named]] = {}
        if kinds:
            for item in block:
                sorts.setdefault((item[1].dtype, kinds.get(id(item[1]))), []).append(item)
            runs: Iterable[Iterable[Named]] = sorts.values()
        else:
            runs = (run for _, run in itertools.groupby(block, key=lambda item: item[1].dtype))
        for run in runs:
            yield from _split(run, limit, ties)


def _merged(
    runs: Iterable[list[Named]], limit: int, kinds: Mapping[int, Hashable], ties: Ties
) -> Iterator[list[Named]]:
    """Neighbouring runs of one dtype and kind put together while they keep to `limit`."""
    kept: list[Named] = []
    filled = 0
    for run in runs:
        size = _size(run, ties)
        first, known = run[0][1], kept[0][1] if kept else None
        is_alike = known is not None and first.dtype == known.dtype and kinds.get(id(first)) == kinds.get(id(known))
        if is_alike and filled + size <= limit:
            kept, filled = kept + run, filled + size
            continue
        if kept:
            yield kept
        kept, filled = run, size
    if kept:
        yield kept


def _split(run: Iterable[Named], limit: int, ties: Ties) -> list[list[Named]]:
    parts: list[list[Named]] = [[]]
    filled = 0
    for _, tied in itertools.groupby(run, key=lambda item: ties[id(item[1])].key if id(item[1]) in ties else item[0]):
        some = list(tied)
        size = _size(some, ties)
        if parts[-1] and filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1] += some
        filled += size
    return parts
