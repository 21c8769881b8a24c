"""Injection of tensor parallelism: slices an existing model over a slicing group, in place.

Rank 0 of the group chooses the layers, by a table of known models, a user's table, or a rule; all ranks do the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor.apply import AT_HAND, Layers, apply_site
from mpispeed.nn.tensor.auto_policy import ruled_sites
from mpispeed.nn.tensor.entry import SequenceCut
from mpispeed.nn.tensor.expert_tensors import ExpertSite, expert_sites, slice_experts
from mpispeed.nn.tensor.hub_plan import planned_sites
from mpispeed.nn.tensor.linear import CutLayer
from mpispeed.nn.tensor.own_slicing import SlicesItself
from mpispeed.nn.tensor.policy import chosen_sites, known_sites
from mpispeed.nn.tensor.row_policy import is_row_policy, row_sites
from mpispeed.nn.tensor.sequence import blocks_of, cut_sequence, uncut_layers
from mpispeed.nn.tensor.shard_plan import Division, Site, child, join
from mpispeed.nn.tensor.vocabulary import cut_vocab, retie, together, told_paths, vocab_paths


@dataclass(frozen=True, slots=True)
class Report:
    """Result of the injection into a model.

    Attributes:
        cut: path of each sliced layer -> "column", "row" or "vocab", and how it was found; "own" for layers of experts.
        whole: path of each linear layer and embedding that is not sliced -> the reason, if there is one.
        ranks: of the slicing group.
        elements: of all parameters before.
        local_elements: of those that this rank has.
    """

    cut: dict[str, str]
    whole: dict[str, str]
    ranks: int
    elements: int
    local_elements: int

    def __str__(self) -> str:
        lines = [f"{len(self.cut)} layers cut over {self.ranks} ranks, {len(self.whole)} whole; "]
        lines[0] += f"{self.local_elements} of {self.elements} parameters on this rank"
        lines += [f"  {path}: {how}" for path, how in self.cut.items()]
        lines += [f"  {path}: whole{f' ({why})' if why else ''}" for path, why in self.whole.items()]
        return "\n".join(lines)


@dataclass(slots=True)
class _Plan:
    sites: list[Site] = field(default_factory=list)
    vocab: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    experts: list[ExpertSite] = field(default_factory=list)
    blocks: str = ""

    def taken(self) -> set[str]:
        """Paths of all layers that are sliced."""
        layers = {path for site in self.sites for path in (site.row, *(column.path for column in site.columns))}
        return {*layers, *self.vocab, *(site.path for site in self.experts)} - {""}


@dataclass(frozen=True, slots=True)
class _Options:
    vocab: bool
    is_sequence_cut: bool
    division: Division
    tries: bool


def inject(
    model: nn.Module,
    comm: Comm,
    policy: Any = None,
    *,
    vocab: bool = False,
    sequence_parallel: bool = False,
    grain: int = 1,
    forward_only: bool = False,
    without_values: bool = False,
    layers: Layers = AT_HAND,
) -> Report:
    """Replace layers of a model by layers that are sliced over `comm`; everything else stays as it is.

    Attention is sliced by heads, with grouped queries by groups; its module's numbers of heads become those of this
    rank. Parameters, buffers and the state of torch's default generator become those of rank 0. Losses and gradients
    are those of the unsplit model up to rounding, with two exceptions for the caller: gradients that
    `partial_gradients` lists have to be summed over `comm`, and generators of the group have to stay equal where the
    model has dropout.

    Args:
        model: with full parameters in host memory, the same on all ranks; changed in place. Those that `layers` has
            not here are left to it.
        comm: the slicing group.
        policy: a table, see `chosen_sites`, or classes with their row-parallel layers, see `row_sites`; nothing else
            is sliced then. None: by the table of this package, the model's own `tp_plan`, or a rule.
        vocab: slice the embedding of tokens and the layer to logits by vocabulary. Logits are still returned in full.
        sequence_parallel: slice the sequence between attention and MLP, in training. Its length has to be a multiple of
            the number of ranks, and every linear layer of a block has to be sliced.
        grain: widths that are no heads are sliced at multiples of it, where each rank gets one.
        forward_only: nobody wants gradients or dropout, so ranks may have copies of keys where these are fewer.
        without_values: the model may be on torch's meta device and stays without values. The rule for other modules is
            left out, as it runs them, but where `layers` gives it copies.
        layers: gives full parameters, one layer at a time.

    Collective over: `comm`.

    Raises:
        ConfigError: nothing can be sliced, attention has fewer heads than ranks, or the policy does not fit.
        UsageError: the model was injected before, or is not the same on all ranks. All errors are raised on all ranks.
    """
    _check_equal(model, comm, without_values=without_values)
    tries = not without_values or layers is not AT_HAND
    options = _Options(vocab, sequence_parallel, Division(comm.size, grain, forward_only), tries)
    plan = _planned(model, comm, policy, options, layers)
    if not without_values:
        _share_values(model, comm, layers)
    elements = _elements(model)
    sequence = SequenceCut(is_on=False) if sequence_parallel else None
    before = {path: module for path, module in model.named_modules()}
    _apply(model, plan, comm, sequence, layers)
    retie(model, before)
    own = _sliced_by_themselves(before, comm, layers, grain)
    _require_some(model, plan, own)
    if sequence is not None:
        cut_sequence(model, plan.blocks, comm, sequence)
    how = _told(plan) | own
    cut = {path: how[path] for path in before if path in how}
    whole = dict.fromkeys(uncut_layers(model), "") | plan.whole
    return Report(cut, whole, comm.size, elements, _elements(model))


def _apply(model: nn.Module, plan: _Plan, comm: Comm, sequence: SequenceCut | None, layers: Layers) -> None:
    """Replace the layers of a plan."""
    for site in plan.sites:
        apply_site(model, site, comm, sequence, layers)
    for path in plan.vocab:
        cut_vocab(model, path, comm, layers)
    for experts in plan.experts:
        slice_experts(model, experts, comm, layers)


def _sliced_by_themselves(modules: Mapping[str, nn.Module], comm: Comm, layers: Layers, grain: int) -> dict[str, str]:
    """Let modules that know how slice themselves; how their inner ones are sliced, by path. Collective over: `comm`."""
    own: dict[str, str] = {}
    for path, module in modules.items():
        if isinstance(module, SlicesItself):
            own.update(dict.fromkeys((join(path, inner) for inner in module.slice_over(comm, layers, grain)), "own"))
    return own


def _check_equal(model: nn.Module, comm: Comm, *, without_values: bool) -> None:
    text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in _tensors(model).items())
    digests = comm.gather_objects(hashlib.sha256(text.encode()).hexdigest())
    msg = ""
    if any(isinstance(module, CutLayer) for module in model.modules()):
        msg = "the model has layers that are cut already; inject it once, before mpispeed.initialize"
    elif len(set(digests)) > 1:
        msg = f"the ranks of {comm} have different models; all have to build the same, with whole parameters"
    elif not without_values and any(tensor.device.type == "meta" for tensor in _tensors(model).values()):
        msg = "the model has parameters on the meta device; give them values before they are cut"
    if msg:
        raise _alike(UsageError(msg))


def _planned(model: nn.Module, comm: Comm, policy: Any, options: _Options, layers: Layers) -> _Plan:
    """Rank 0's plan or its error, on all ranks."""
    found: Any = None
    if comm.rank == 0:
        try:
            found = _plan(model, policy, options, layers)
        except ConfigError as problem:
            found = str(problem)
        except Exception as problem:
            found = f"the model cannot be examined: {type(problem).__name__}: {problem}"
    found = comm.share(found)
    if isinstance(found, str):
        raise _alike(ConfigError(found))
    return found


def _plan(model: nn.Module, policy: Any, options: _Options, layers: Layers) -> _Plan:
    division = options.division
    if division.grain < 1:
        msg = f"grain={division.grain}; slices are multiples of at least one element"
        raise ConfigError(msg)
    plan = _Plan(vocab=vocab_paths(model) if options.vocab else [])
    if policy is None:
        _find_all(model, plan, options, layers)
    else:
        find = row_sites if is_row_policy(model, policy) else chosen_sites
        chosen = find(model, policy, division)
        plan.sites, plan.whole = [site for site in chosen.sites if site.scope not in plan.vocab], chosen.whole
        plan.vocab += [path for path in chosen.vocab if path not in plan.vocab]
    _leave_shared(model, plan)
    _leave_whole(model, plan)
    plan.vocab, odd = together(model, plan.vocab)
    plan.whole |= odd
    plan.blocks = blocks_of(model, plan.sites) if options.is_sequence_cut else ""
    return plan


def _find_all(model: nn.Module, plan: _Plan, options: _Options, layers: Layers) -> None:
    """Look for layers by the table, then the model's own plan, then the rule."""
    plan.sites = list(known_sites(model, options.division))
    plan.experts = list(expert_sites(model, options.division))
    planned, experts = planned_sites(model, options.division, plan.taken() | set(told_paths(model)))
    plan.sites += planned.sites
    plan.experts += experts
    if options.tries:
        ruled = ruled_sites(model, options.division, plan.taken(), layers)
        plan.sites += ruled.sites
        planned.whole |= ruled.whole
    cut = plan.taken()
    plan.whole = {path: why for path, why in planned.whole.items() if not any(p.startswith(f"{path}.") for p in cut)}


def _told(plan: _Plan) -> dict[str, str]:
    """How each layer of a plan is sliced, by path."""
    how = {column.path: f"column, {site.source}" for site in plan.sites for column in site.columns}
    how |= {site.row: f"row, {site.source}" for site in plan.sites if site.row}
    how |= {site.path: f"experts, {site.source}" for site in plan.experts}
    return how | dict.fromkeys(plan.vocab, "vocab")


def _require_some(model: nn.Module, plan: _Plan, own: Mapping[str, str]) -> None:
    if plan.taken() or own:
        return
    reasons = "; ".join(f"{path}: {why}" for path, why in list(plan.whole.items())[:5])
    msg = f"no layer of {type(model).__name__} can be cut{f' ({reasons})' if reasons else ''}; name layers in a "
    msg += 'policy, e.g. {"mlp.fc1": "column", "mlp.fc2": "row"}, or turn tensor parallelism off'
    raise _alike(ConfigError(msg))


def _leave_whole(model: nn.Module, plan: _Plan) -> None:
    """Drop sites inside of what a layer wants whole, and experts that it slices itself."""
    for path, module in model.named_modules():
        if not isinstance(module, SlicesItself):
            continue
        plan.experts = [site for site in plan.experts if not site.path.startswith(f"{path}.")]
        inner, reason = module.whole_part()
        start = f"{join(path, inner)}."
        for site in [site for site in plan.sites if reason and site.scope.startswith(start)]:
            plan.whole[site.scope] = reason
            plan.sites.remove(site)


def _leave_shared(model: nn.Module, plan: _Plan) -> None:
    """Drop sites whose weights other modules use too: they cannot be sliced for one of them."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners[id(param)] = owners.get(id(param), 0) + 1
    for site in list(plan.sites):
        for path in (site.row, *(column.path for column in site.columns)):
            layer: Any = child(model, path)
            if path and owners[id(layer.weight)] > 1:
                plan.whole[site.scope] = f"{path} shares its weight with another module"
                plan.sites.remove(site)
                break


def _share_values(model: nn.Module, comm: Comm, layers: Layers) -> None:
    """Give all ranks rank 0's parameters, buffers and generator."""
    with torch.no_grad():
        for tensor in filter(layers.has, _tensors(model).values()):
            values = tensor.detach().contiguous()
            comm.broadcast(values)
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)
    torch.set_rng_state(comm.share(torch.get_rng_state()))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _elements(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def _alike(error: Any) -> Any:
    error.is_collective = True
    return error
