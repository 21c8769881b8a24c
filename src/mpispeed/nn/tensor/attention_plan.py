"""Plan of slicing for attention: whole heads of queries, with grouped queries whole groups with their key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.base.even_split import share
from mpispeed.nn.tensor.shard_plan import FORMS, Column, Division, Narrowed, Site, child, known_shape
from mpispeed.nn.tensor.tensor_cut import Ranges

# names under which attention modules, or their configs, keep these numbers
_QUERIES = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_attn_heads",
    "attention_heads",
    "nhead",
    "heads",
)
_KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "num_kv")
_GROUPS = ("num_key_value_groups", "n_rep")
_WIDTHS = ("embed_dim", "hidden_size", "all_head_size", "split_size", "inner_dim", "d_model", "dim", "n_embd")

_Ranges = tuple[tuple[int, int], ...]  # one for each rank

# By class: what reaches it with all heads, because others compute it (ALiBi), or keeps a number for each head
_NARROWED: Mapping[str, Narrowed] = MappingProxyType(
    {
        "BloomAttention": Narrowed(argument="alibi"),
        "T5Attention": Narrowed("relative_attention_bias"),
    }
)


class TooFewHeadsError(ConfigError):
    """Attention has fewer heads than there are ranks to share them."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of an attention module.

    Attributes:
        queries: heads of queries.
        keys: heads of keys and values.
        width: of a head, as the layer behind attention takes it.
    """

    queries: int
    keys: int
    width: int

    def on_ranks(self, division: Division) -> tuple[_Ranges, _Ranges]:
        """Ranges of queries, and of keys, of each rank.

        With copies of keys, ranks are dealt to keys as evenly as can be, and the queries of a key to its ranks.
        """
        size = division.size
        if not self.has_copies(division):
            keys = tuple(share(self.keys, rank, size) for rank in range(size))
            each = self.queries // self.keys
            return tuple((start * each, stop * each) for start, stop in keys), keys
        queries, owned = [], []
        each = self.queries // self.keys
        for key in range(self.keys):
            start, stop = share(size, key, self.keys)
            for place in range(stop - start):
                first, last = share(each, place, stop - start)
                queries.append((key * each + first, key * each + last))
                owned.append((key, key + 1))
        return tuple(queries), tuple(owned)

    def has_copies(self, division: Division) -> bool:
        """True if ranks have the same key."""
        return division.forward_only and self.keys < division.size


def attention_site(
    model: nn.Module,
    scope: str,
    columns: Mapping[str, str],
    row: str,
    division: Division,
    *,
    after: tuple[str, ...] = (),
    partial: tuple[str, ...] = (),
    source: str = "",
) -> Site:
    """A site that is sliced by heads.

    Args:
        model: the whole model.
        scope: path of the module that contains the layers.
        columns: path of each -> its form.
        row: path of the row-parallel layer, whose inputs are the heads.
        division: how.
        after: as of `Site`.
        partial: likewise.
        source: for the report.

    Raises:
        ConfigError: there is no number of heads, or it does not fit to the widths.
        TooFewHeadsError: there are fewer than ranks.
    """
    inner = known_shape(model, row).inputs
    path, holder = _holder(model, scope, next(iter(columns)))
    heads = _heads(holder, path, inner)
    if heads.queries < division.size:
        msg = f"{path} has {heads.queries} heads, fewer than the {division.size} ranks that shall share them; "
        msg += f"use at most {heads.queries} ranks for tensor parallelism, or leave it whole in a policy"
        raise TooFewHeadsError(msg)
    made = tuple(_column(model, layer, form, heads, division) for layer, form in columns.items())
    queries, keys = heads.on_ranks(division)
    ranges = tuple((own,) for own in _elements(queries, heads.width)) if heads.has_copies(division) else ()
    names = {base.__name__ for base in type(holder).__mro__}
    narrowed = tuple(one for name, one in _NARROWED.items() if name in names and _is_there(holder, one))
    return Site(
        scope,
        path,
        made,
        row,
        inner // heads.keys,
        ranges,
        queries,
        tuple(_attributes(holder, heads, queries, keys)),
        narrowed,
        after,
        partial,
        source,
    )


def _is_there(holder: nn.Module, narrowed: Narrowed) -> bool:
    return child(holder, narrowed.module) is not None


def _holder(model: nn.Module, scope: str, layer: str) -> tuple[str, Any]:
    """The module that knows the numbers of heads, from that of a layer up to the scope."""
    nearest = path = layer.rpartition(".")[0]
    while not number(child(model, path), _QUERIES) and len(path) > len(scope):
        path = path.rpartition(".")[0]
    path = path if number(child(model, path), _QUERIES) else nearest
    return path, child(model, path)


def _attributes(holder: Any, heads: Heads, queries: _Ranges, keys: _Ranges) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Numbers that the module itself keeps, with their values on each rank."""
    own = tuple(stop - start for start, stop in queries)
    values = {
        _QUERIES: (heads.queries, own),
        _KEYS: (heads.keys, tuple(stop - start for start, stop in keys)),
        _WIDTHS: (heads.queries * heads.width, tuple(count * heads.width for count in own)),
    }
    if sum(stop - start for start, stop in keys) > heads.keys:  # copies: one key with all queries of the rank
        values[_GROUPS] = (heads.queries // heads.keys, own)
    for names, (whole, parts) in values.items():
        for name in names:
            if holder.__dict__.get(name) == whole:
                yield name, parts


def _column(model: nn.Module, path: str, form: str, heads: Heads, division: Division) -> Column:
    outputs, inner, keys = known_shape(model, path).outputs, heads.queries * heads.width, heads.keys * heads.width
    sizes = {"qkv": (inner, keys, keys), "kv": (keys, keys), "interleaved": (inner + 2 * keys,)}.get(form, (outputs,))
    if sum(sizes) != outputs or any(part % heads.keys for part in sizes) or form == "gate_up":
        msg = f"{path} ({form}) has {outputs} outputs, which are not those of {heads.queries} heads of width "
        msg += (
            f"{heads.width} with {heads.keys} keys; name its form in a policy ({', '.join(FORMS)}), or leave it whole"
        )
        raise ConfigError(msg)
    if heads.has_copies(division):
        return Column(path, ranges=_copied(path, form, sizes, heads, division))
    return Column(path, sizes if len(sizes) > 1 else (), tuple(part // heads.keys for part in sizes))


def _copied(path: str, form: str, sizes: tuple[int, ...], heads: Heads, division: Division) -> Ranges:
    """The outputs of each rank where ranks have the same key."""
    of_queries, of_keys = heads.on_ranks(division)
    keys = heads.keys * heads.width
    if form == "interleaved" or any(part != keys and part % heads.queries for part in sizes):
        msg = f"{path} ({form}) cannot be cut for more ranks ({division.size}) than it has keys ({heads.keys}); use at "
        msg += f"most {heads.keys} ranks for tensor parallelism, or leave it whole in a policy"
        raise ConfigError(msg)
    parts, begin = [], 0
    for part in sizes:
        own, count = (of_keys, heads.keys) if part == keys else (of_queries, heads.queries)
        parts.append(_elements(own, part // count, begin))
        begin += part
    return tuple(zip(*parts, strict=True))


def _elements(own: _Ranges, width: int, begin: int = 0) -> _Ranges:
    """Ranges of elements for ranges of heads, one for each rank."""
    return tuple((begin + start * width, begin + stop * width) for start, stop in own)


def _heads(holder: Any, path: str, inner: int) -> Heads:
    queries = number(holder, _QUERIES)
    groups = number(holder, _GROUPS)
    keys = number(holder, _KEYS) or (queries // groups if queries and groups else queries)
    if not queries or not keys:
        msg = f"{path} ({type(holder).__name__}) has no number of heads ({', '.join(_QUERIES[:4])}, ...)"
        raise ConfigError(msg)
    if inner % queries or queries % keys:
        msg = f"{path} has {queries} heads, {keys} of keys, for a width of {inner}: these do not divide"
        raise ConfigError(msg)
    return Heads(queries, keys, inner // queries)


def number(holder: Any, names: Iterable[str]) -> int:
    """The first of these attributes that is a whole number, of the module or else of its config; 0 for none."""
    names = tuple(names)
    for owner in (holder, getattr(holder, "config", None)):
        for name in names:
            found = getattr(owner, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0
