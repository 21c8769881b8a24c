"""The plan that a model of `transformers` brings for its slicing, translated into sites.

A plan names layers by patterns, with "*" for numbers, and gives each a style. Source: `transformers`,
`distributed/tensor_parallel.py` of version 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mpispeed.nn.tensor.expert_tensors import ExpertSite, expert_site
from mpispeed.nn.tensor.policy import Chosen, joined_sites
from mpispeed.nn.tensor.shard_plan import FUSED, INTERLEAVED, Column, Division, Site, join, shape_of

SOURCE = "tp_plan"

_LAYERS = {
    "colwise": "column",
    "packed_colwise": "gate_up",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "rowwise": "row",
    "rowwise_split_input": "split",
    "rowwise_rep": "split",
}
# (dim from the end, parts) of a parameter with all experts
_TENSORS = {"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)}
_EXPERTS = "moe_tp_experts"
_PARTIAL = "replicated_with_grad_allreduce"
# what stays whole; embeddings are sliced by vocabulary, if that is asked for
_WHOLE = ("", "replicate", _PARTIAL, "embedding_rowwise", "embedding_colwise")
_ONLY_GRADIENTS = "mla_kv_a_proj"


def planned_sites(model: nn.Module, division: Division, taken: Collection[str]) -> tuple[Chosen, list[ExpertSite]]:
    """The sites of the plan of the model, none if it has no plan. Nothing of the model is run.

    Args:
        model: the whole model.
        division: how to slice.
        taken: paths of layers that have a site already, or are sliced by vocabulary.

    Raises:
        ConfigError: attention has fewer heads than ranks.
    """
    plan: Any = getattr(model, "tp_plan", None)
    if not plan or not isinstance(plan, Mapping):
        return Chosen(), []
    styles = {path: plan[_pattern(path)] for path, _ in model.named_modules() if _pattern(path) in plan}
    kinds = {
        path: _kind(path, style)
        for path, style in styles.items()
        if style in _LAYERS and path not in taken and shape_of(model.get_submodule(path))
    }
    chosen = joined_sites(model, kinds, division, SOURCE, is_strict=False)
    for site in list(chosen.sites):
        reason = _reason_against(model, site, plan, division)
        if reason:
            chosen.sites.remove(site)
            chosen.whole[site.scope] = reason
    chosen.sites = [replace(site, partial=_partial(model, site, styles)) for site in chosen.sites]
    gathered = (path for path, kind in kinds.items() if kind == "gather")
    chosen.sites += [Site(path, path, (Column(path),), "", source=SOURCE) for path in gathered]
    return chosen, [
        site
        for path, style in styles.items()
        if style == _EXPERTS and path not in taken
        for site in _experts(model, path, plan, division)
    ]


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _kind(path: str, style: str) -> str:
    """The kind of a layer; the fused ones of style "colwise" have the parts of each head together."""
    is_fused = style == "colwise" and path.rpartition(".")[2] in (*FUSED, *INTERLEAVED)
    return "interleaved" if is_fused else _LAYERS[style]


def _reason_against(model: nn.Module, site: Site, plan: Mapping[str, str], division: Division) -> str:
    """What stands in the plan about the inside of a site and has no translation, or ""."""
    if not site.row:
        return "its tp_plan has no layer that takes these outputs"
    known = {*_LAYERS, *_WHOLE, *((_ONLY_GRADIENTS,) if division.forward_only else ())}
    scope = model.get_submodule(site.scope)
    for path, module in scope.named_modules(prefix=site.scope):
        style = plan.get(_pattern(path), "")
        if style not in known:
            return f"its tp_plan has {path} in the style {style!r}, which has no translation"
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            if plan.get(_pattern(name), "") not in _WHOLE:
                return f"its tp_plan slices the parameter {name} by itself"
    return ""


def _partial(model: nn.Module, site: Site, styles: Mapping[str, str]) -> tuple[str, ...]:
    """Replicated parameters in a site that every head uses."""
    return tuple(
        join(path, name)
        for path, module in model.get_submodule(site.scope).named_modules()
        if styles.get(join(site.scope, path)) == _PARTIAL
        for name, _ in module.named_parameters(recurse=False)
    )


def _experts(model: nn.Module, path: str, plan: Mapping[str, str], division: Division) -> Iterator[ExpertSite]:
    module = model.get_submodule(path)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    found = {name: _TENSORS.get(plan.get(_pattern(join(path, name)), "")) for name in names}
    parts = {name: (how[0] % 3, how[1]) for name, how in found.items() if how is not None}
    site = expert_site(module, path, parts, division, SOURCE) if parts else None
    if site is not None:
        yield site
