"""Equivalence test of a sliced module on simulated ranks with the original, before anything is changed."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from mpispeed.mesh import sim
from mpispeed.nn.tensor.apply import AT_HAND, Layers, apply_site
from mpispeed.nn.tensor.shard_plan import Site, child, shape_of
from mpispeed.nn.tensor.tensor_cut import COPIED, Ranges, cuts

#: how a reason begins that is no proof of a difference
UNPROVED = "cannot be tried"

_BATCH, _LENGTH = 2, 5
_BOUND = 1e-4  # of the largest element; the sums are fp64, but modules may compute parts of them in fp32
_LARGEST = 1 << 26  # parameters; above, the copies would cost too much memory


def prove(module: nn.Module, site: Site, size: int, layers: Layers = AT_HAND) -> tuple[tuple[str, ...], str]:
    """Slice a copy of the module for `size` simulated ranks and compare with the original.

    Args:
        module: the scope of the site; it is not changed. It is called in evaluation mode, with hidden states alone.
        site: with paths below the module.
        size: number of ranks.
        layers: makes the copies.

    Returns:
        (names of replicated parameters whose gradients are partial sums, "") or ((), reason). The reason begins with
            `UNPROVED` where the original module could not be run.
    """
    first = shape_of(child(module, site.columns[0].path))
    if first is None or not _takes_one(module):
        return (), f"{UNPROVED}: it needs more than hidden states"
    if sum(param.numel() for param in module.parameters()) > _LARGEST:
        return (), f"{UNPROVED}: it is too large"
    x = torch.randn(_BATCH, _LENGTH, first.inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    try:
        whole = _copy(module, layers)
        out, grads = _run(whole, x)
    except Exception as problem:
        return (), f"{UNPROVED}: {type(problem).__name__}: {str(problem)[:200]}"

    def work(world: Any) -> Any:
        part = _copy(module, layers)
        apply_site(part, site, world.comm)
        return part, *_run(part, x)

    try:
        ranks = sim.run(size, work)
    except Exception as problem:
        return (), f"fails when it is cut: {type(problem).__name__}: {str(problem)[:200]}"
    return _compare(out, grads, ranks)


def _compare(out: torch.Tensor, grads: dict[str, torch.Tensor], ranks: list[Any]) -> tuple[tuple[str, ...], str]:
    known = cuts(ranks[0][0])
    if not all(_is_near(found, out) for _, found, _ in ranks):
        return (), "computes something else when it is cut"
    partial = []
    for name, expected in grads.items():
        parts = [found.get(name, torch.zeros(())) for _, _, found in ranks]
        cut = known.get(name)
        if cut is not None and cut.kind != "replicated":
            joined = cut.join(parts) if cut.kind != COPIED else _added(cut.ranges_of_ranks, cut.dim, parts, expected)
            is_right = _is_near(joined, expected)
        elif all(_is_near(part, expected) for part in parts):
            is_right = True
        else:
            is_right = _is_near(torch.stack([part.expand_as(expected) for part in parts]).sum(0), expected)
            partial.append(name)
        if not is_right:
            return (), f"has another gradient of {name or 'its input'} when it is cut"
    if "" in partial:
        return (), "has another gradient of its input when it is cut"
    return tuple(partial), ""


def _added(ranges: Ranges, dim: int, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter of which ranks have copies: partial sums."""
    whole = torch.zeros_like(like)
    for own, part in zip(ranges, parts, strict=True):
        begin = 0
        for start, stop in own:
            whole.narrow(dim, start, stop - start).add_(part.narrow(dim, begin, stop - start))
            begin += stop - start
    return whole


def _run(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients by name; that of the input has the name ""."""
    x = x.clone().requires_grad_()
    out = module(x)
    while isinstance(out, (tuple, list)):
        out = out[0]
    slope = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    out.backward(slope)
    grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
    return out.detach(), {"": torch.zeros_like(x) if x.grad is None else x.grad, **grads}


def _copy(module: nn.Module, layers: Layers) -> nn.Module:
    made = layers.copied(module).double().eval().requires_grad_()
    made.zero_grad()
    return made


def _is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    scale = expected.abs().max().item() if expected.numel() else 0.0
    return not expected.numel() or bool((found - expected).abs().max().item() <= _BOUND * max(scale, 1e-6))


def _takes_one(module: nn.Module) -> bool:
    """True if forward needs one argument only."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    params = inspect.signature(module.forward).parameters.values()
    needed = [p for p in params if p.default is inspect.Parameter.empty]
    return len([p for p in needed if p.kind in kinds]) == 1 and all(
        p.kind is not inspect.Parameter.KEYWORD_ONLY for p in needed
    )
