"""Which parameters are fetched, reduced and published together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from mpispeed.store.layout import FlatLayout
from mpispeed.store.table import Table, Unit


def plan_units(model: nn.Module, group_of: Mapping[int, int], parts: int, limit_elements: int) -> Table:
    """Deal the trainable parameters of `model` to units.

    A unit is a run of parameters, in registration order, that belong to the same block: a child of the
    outermost `ModuleList` or `Sequential` on their path. Parameters outside of any such list (embeddings,
    heads) form units between the blocks. A unit holds one dtype and, unless a single parameter is larger,
    at most `limit_elements`.

    Args:
        model: its parameters are dealt, none is changed.
        group_of: parameter group index by `id` of the parameter; parameters not listed are not managed.
        parts: number of equal cuts of each unit's flat buffer.
        limit_elements: largest unit of several parameters.
    """
    blocks = _block_prefixes(model)
    named = [(name, param) for name, param in model.named_parameters() if id(param) in group_of]
    units: list[Unit] = []

    def kind(item: tuple[str, nn.Parameter]) -> tuple[str, torch.dtype]:
        return _block_of(item[0], blocks), item[1].dtype

    for (block, dtype), run in itertools.groupby(named, key=kind):
        for part in _split(run, limit_elements):
            tensors = [(name, tuple(param.shape), group_of[id(param)]) for name, param in part]
            layout = FlatLayout(tensors, parts)
            by_name = dict(part)
            params = tuple(by_name[entry.name] for entry in layout.entries)
            units.append(Unit(len(units), block or part[0][0], layout, params, dtype))
    return Table(tuple(units), aliases=tied_names(model))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters, each with the canonical (first) name."""
    canonical = {id(param): name for name, param in model.named_parameters()}
    return {
        name: canonical[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if canonical[id(param)] != name
    }


def _block_prefixes(model: nn.Module) -> set[str]:
    prefixes: set[str] = set()
    for name, module in model.named_modules():
        inside = any(name == p or name.startswith(p + ".") for p in prefixes)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not inside:
            prefixes.update(f"{name}.{child}" if name else child for child, _ in module.named_children())
    return prefixes


def _block_of(name: str, blocks: set[str]) -> str:
    path = name.split(".")
    for length in range(1, len(path)):
        prefix = ".".join(path[:length])
        if prefix in blocks:
            return prefix
    return ""


def _split(run: Iterable[tuple[str, nn.Parameter]], limit: int) -> list[list[tuple[str, nn.Parameter]]]:
    parts: list[list[tuple[str, nn.Parameter]]] = [[]]
    filled = 0
    for name, param in run:
        if parts[-1] and filled + param.numel() > limit:
            parts.append([])
            filled = 0
        parts[-1].append((name, param))
        filled += param.numel()
    return parts
