"""Automatic policy for unknown modules: layers that look like attention or an MLP are sliced where that can be proved.

Names and widths give candidates. Where the module can be called with hidden states alone, the candidate is sliced and
run on simulated ranks, and outputs and gradients are compared with the original module's. Modules with other inputs are
trusted if their layers have the names of separate query, key, value and output, or of an MLP. All others are not
sliced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.tensor.apply import AT_HAND, Layers
from mpispeed.nn.tensor.attention_plan import TooFewHeadsError, attention_site
from mpispeed.nn.tensor.dropout import functional_dropouts
from mpispeed.nn.tensor.equivalence import UNPROVED, prove
from mpispeed.nn.tensor.shard_plan import FUSED, INTERLEAVED, Division, Site, child, join, mlp_site, shape_of

# Names of separate layers, and of the layers behind them
_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)
_OUTPUTS = (
    "o_proj", "out_proj", "out_lin", "to_out", "to_out.0", "wo", "o", "dense", "c_proj", "proj", "out", "output",
)  # fmt: skip
_MLPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("intermediate.dense",), "output.dense"),
)
# of norms of single heads, which every rank applies to its own
_HEAD_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
# by convention numbers that only the weights of attention are dropped with
_ATTENTION_DROPOUT = ("attention_dropout", "attn_dropout")


@dataclass(slots=True)
class Found:
    """Result of the automatic policy.

    Attributes:
        sites: to be sliced.
        whole: path of a rejected candidate -> the reason.
    """

    sites: list[Site] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Candidate:
    columns: dict[str, str]
    row: str
    has_heads: bool
    is_trusted: bool


_Prover = Callable[[nn.Module, Site], tuple[tuple[str, ...], str]]


def ruled_sites(model: nn.Module, division: Division, taken: set[str], layers: Layers = AT_HAND) -> Found:
    """The sites in modules that no table knows.

    Args:
        model: the whole model.
        division: how to slice.
        taken: paths of layers that other sites have.
        layers: makes copies of modules to be tried.

    Raises:
        ConfigError: attention has fewer heads than ranks.
    """
    found = Found()
    proved: dict[object, Site | str] = {}
    skipped: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            skipped.append(path)
            found.whole[path] = "uses its layers' weights without calling them"
        if any(path == above or path.startswith(f"{above}.") for above in skipped):
            continue
        for candidate in _candidates(module):
            paths = {join(path, layer) for layer in (*candidate.columns, candidate.row)}
            if paths & taken:
                continue
            result = _settle(
                model, path, candidate, partial(prove, size=division.size, layers=layers), division, proved
            )
            if isinstance(result, str):
                found.whole[path] = result
            else:
                taken |= paths
                found.sites.append(result)
    return _alike(model, found)


def _alike(model: nn.Module, found: Found) -> Found:
    """Slice attention of one class everywhere or nowhere: its modules may share tensors with all heads."""
    odd = {type(model.get_submodule(path)): path for path in found.whole}
    for site in list(found.sites):
        path = odd.get(type(model.get_submodule(site.scope)))
        if site.heads and path is not None:
            found.sites.remove(site)
            found.whole[site.scope] = f"is of one class with {path}"
    return found


def _candidates(module: nn.Module) -> Iterator[_Candidate]:
    """Candidate sites of a module, surest first."""

    def has(*names: str) -> bool:
        return all(shape_of(child(module, name)) for name in names)

    for below in ("", "self", "attention"):
        holder = child(module, below)
        if holder is None:
            continue
        rows = _OUTPUTS if not below else ("output.dense", "output", "out_proj")
        forms = [(dict.fromkeys((join(below, n) for n in names), "column"), True) for names in _SEPARATE]
        forms += [({join(below, name): "qkv"}, False) for name in FUSED]
        forms += [({join(below, name): "interleaved"}, False) for name in INTERLEAVED]
        for columns, is_trusted in forms:
            row = next((row for row in rows if row not in columns and has(row)), "")
            if row and has(*columns):
                yield _Candidate(columns, row, True, is_trusted)
                break
    for names, row in _MLPS:
        if has(*names, row):
            yield _Candidate(dict.fromkeys(names, "column"), row, False, True)
            return
    plain = [name for name, part in module.named_children() if shape_of(part)]
    if len(plain) == 2:
        first, last = (shape_of(child(module, name)) for name in plain)
        if first and last and (first.inputs, first.outputs) == (last.outputs, last.inputs):
            yield _Candidate({plain[0]: "column"}, plain[1], False, False)


def _settle(
    model: nn.Module,
    path: str,
    candidate: _Candidate,
    prover: _Prover,
    division: Division,
    proved: dict[object, Site | str],
) -> Site | str:
    """The site, or the reason against it; modules that are alike are proved once."""
    module = model.get_submodule(path)
    key = (type(module), repr(module), tuple(candidate.columns.items()), candidate.row)
    if key not in proved:
        proved[key] = _examine(module, candidate, prover, division)
    known = proved[key]
    if isinstance(known, str):
        return known
    columns = tuple(replace(column, path=join(path, column.path)) for column in known.columns)
    return replace(known, scope=path, holder=join(path, known.holder), columns=columns, row=join(path, known.row))


def _examine(module: nn.Module, candidate: _Candidate, prover: _Prover, division: Division) -> Site | str:
    """A candidate within its own module: paths are relative to it."""
    holder = child(module, next(iter(candidate.columns)).rpartition(".")[0]) or module
    drops = [name for name in functional_dropouts(holder) if name not in _ATTENTION_DROPOUT]
    if drops and not division.forward_only:
        return f"drops activations by the number {drops[0]}, in a place that is not known"
    outside = _from_outside(holder) if candidate.has_heads else ""
    if outside:
        return f"may be given {outside} with all heads"
    make = attention_site if candidate.has_heads else mlp_site
    try:
        site = make(module, "", candidate.columns, candidate.row, division, source="rule")
    except TooFewHeadsError:
        raise
    except ConfigError as problem:
        return str(problem)
    reasons = []
    for attempt in (site, replace(site, attributes=_counts_only(site))):
        sums, reason = prover(module, attempt)
        if not reason:
            return replace(attempt, partial=sums, source="rule, proved")
        if reason.startswith(UNPROVED):
            return _trusted(module, candidate, site, reason)
        reasons.append(reason)
        if not site.attributes:
            break
    return reasons[0]


def _from_outside(holder: nn.Module) -> str:
    """The argument by which attention may be given numbers for every head, or ""; a trial leaves it out."""
    names = inspect.signature(holder.forward).parameters
    return next((name for name in names if "bias" in name or "alibi" in name), "")


def _trusted(module: nn.Module, candidate: _Candidate, site: Site, reason: str) -> Site | str:
    """The site if its names alone are enough, else the reason against it."""
    layers = {*candidate.columns, candidate.row}
    others = [
        name
        for name, _ in (child(module, site.holder) or module).named_parameters()
        if join(site.holder, name.rpartition(".")[0]) not in layers
    ]
    norms = tuple(join(site.holder, name) for name in others if name.split(".")[0] in _HEAD_NORMS)
    is_alone = candidate.has_heads or all(shape_of(part) or not list(part.parameters()) for part in module.children())
    if not candidate.is_trusted or not is_alone or (candidate.has_heads and len(norms) != len(others)):
        return reason
    return replace(site, partial=norms, source="rule, by names")


def _counts_only(site: Site) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The attributes that are numbers of heads, without widths."""
    return tuple((name, value) for name, value in site.attributes if "head" in name or name in ("nhead", "num_kv"))
