"""Plan of slicing: column-parallel layers and the row-parallel one behind them. Plain data, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError

#: layout of the outputs of a column-parallel layer
FORMS = ("column", "qkv", "kv", "gate_up")

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


@dataclass(frozen=True, slots=True)
class Column:
    """A layer sliced by its outputs, with arguments of `ColumnLinear`.

    Attributes:
        path: of the layer in the model.
        sub_sizes: as of `ColumnLinear`.
        grains: likewise.
    """

    path: str
    sub_sizes: tuple[int, ...] = ()
    grains: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """One region between column-parallel layers and a row-parallel one.

    Attributes:
        scope: path of the module that contains all of it.
        holder: path of the module whose forward is between them, and has the numbers of heads.
        columns: layers that are sliced by their outputs.
        row: path of the layer that is sliced by its inputs and sums; "" for none, then outputs are gathered.
        grain: its share of the inputs is a multiple of it.
        groups: heads of keys, each with its queries, divided between the ranks; 0 for no attention.
        attributes: (name, value for one group) of numbers that the holder keeps.
        after: dropouts of the holder that come behind the row-parallel layer.
        partial: names in the scope of replicated parameters that every head uses.
        source: how it was found.
    """

    scope: str
    holder: str
    columns: tuple[Column, ...]
    row: str
    grain: int = 1
    groups: int = 0
    attributes: tuple[tuple[str, int], ...] = ()
    after: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of a layer that can be sliced."""

    inputs: int
    outputs: int
    is_transposed: bool


def shape_of(module: Any) -> Shape | None:
    """The widths of a plain linear layer, or None.

    Subclasses and layers with hooks are left alone, because they may do anything.
    """
    if not isinstance(module, nn.Module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    if module._backward_hooks or module._backward_pre_hooks:
        return None
    if type(module) is nn.Linear:
        return Shape(module.in_features, module.out_features, False)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, nn.Parameter) and weight.dim() == 2:
        return Shape(int(weight.shape[0]), int(weight.shape[1]), True)
    return None


def child(module: nn.Module, path: str) -> nn.Module | None:
    """The module at a path below, or None."""
    for name in path.split(".") if path else ():
        found = module._modules.get(name)
        if found is None:
            return None
        module = found
    return module


def join(*parts: str) -> str:
    """A path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def common(paths: Iterable[str]) -> str:
    """The longest path that all begin with, without their last names."""
    split = [path.split(".")[:-1] for path in paths]
    kept = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        kept.append(names[0])
    return ".".join(kept)


def mlp_site(
    model: nn.Module, scope: str, columns: Mapping[str, str], row: str, *, grain: int = 1, source: str = ""
) -> Site:
    """A site without heads.

    Args:
        model: the whole model.
        scope: path of the module that contains the layers.
        columns: path of each -> its form.
        row: path of the row-parallel layer.
        grain: widths are sliced at multiples of it.
        source: for the report.

    Raises:
        ConfigError: widths do not fit.
    """
    inner = known_shape(model, row).inputs
    made = []
    for path, form in columns.items():
        outputs, parts = known_shape(model, path).outputs, 2 if form == "gate_up" else 1
        if outputs != parts * inner or form in ("qkv", "kv"):
            msg = f"{path} ({form}) has {outputs} outputs, and {row} behind it {inner} inputs: they cannot be cut alike"
            raise ConfigError(msg)
        made.append(Column(path, (inner,) * parts if parts > 1 else (), (grain,) * parts))
    holder = next(iter(columns)).rpartition(".")[0]
    return Site(scope, holder, tuple(made), row, grain, source=source)


def attention_site(
    model: nn.Module,
    scope: str,
    columns: Mapping[str, str],
    row: str,
    size: int,
    *,
    after: tuple[str, ...] = (),
    partial: tuple[str, ...] = (),
    source: str = "",
) -> Site:
    """A site that is sliced by groups of heads.

    Args:
        model: the whole model.
        scope: path of the module that contains the layers.
        columns: path of each -> its form.
        row: path of the row-parallel layer, whose inputs are the heads.
        size: ranks to slice for.
        after: as of `Site`.
        partial: likewise.
        source: for the report.

    Raises:
        ConfigError: there is no number of heads, it does not fit to the widths, or there are fewer than ranks.
    """
    holder_path = next(iter(columns)).rpartition(".")[0]
    holder = child(model, holder_path)
    inner = known_shape(model, row).inputs
    queries, keys = _heads(holder, holder_path, inner)
    if queries < size:
        msg = f"{holder_path} has {queries} heads, fewer than the {size} ranks that shall share them; "
        msg += f"use at most {queries} ranks for tensor parallelism, or leave it whole in a policy"
        raise ConfigError(msg)
    made = tuple(_column(model, path, form, inner, (queries, keys)) for path, form in columns.items())
    attributes = [(name, queries // keys) for name in _QUERIES if holder.__dict__.get(name) == queries]
    attributes += [(name, 1) for name in _KEYS if holder.__dict__.get(name) == keys]
    attributes += [(name, inner // keys) for name in _WIDTHS if holder.__dict__.get(name) == inner]
    cut = (made, row, inner // keys, keys, tuple(attributes))
    return Site(scope, holder_path, *cut, after=after, partial=partial, source=source)


def _column(model: nn.Module, path: str, form: str, inner: int, heads: tuple[int, int]) -> Column:
    outputs, (queries, keys) = known_shape(model, path).outputs, heads
    width = inner // queries
    sizes = {"qkv": (inner, keys * width, keys * width), "kv": (keys * width, keys * width)}.get(form, (outputs,))
    if sum(sizes) != outputs or any(part % keys for part in sizes) or form == "gate_up":
        msg = f"{path} ({form}) has {outputs} outputs, which are not those of {queries} heads of width {width} with "
        msg += f"{keys} keys; name its form in a policy ({', '.join(FORMS)}), or leave it whole"
        raise ConfigError(msg)
    return Column(path, sizes if len(sizes) > 1 else (), tuple(part // keys for part in sizes))


def _heads(holder: Any, path: str, inner: int) -> tuple[int, int]:
    """(heads of queries, heads of keys)."""
    queries = number(holder, _QUERIES)
    groups = number(holder, _GROUPS)
    keys = number(holder, _KEYS) or (queries // groups if queries and groups else queries)
    if not queries or not keys:
        msg = f"{path} ({type(holder).__name__}) has no number of heads ({', '.join(_QUERIES[:4])}, ...)"
        raise ConfigError(msg)
    if inner % queries or queries % keys:
        msg = f"{path} has {queries} heads, {keys} of keys, for a width of {inner}: these do not divide"
        raise ConfigError(msg)
    return queries, keys


def number(holder: Any, names: Iterable[str]) -> int:
    """The first of these attributes that is a whole number, of the module or else of its config; 0 for none."""
    names = tuple(names)
    for owner in (holder, getattr(holder, "config", None)):
        for name in names:
            found = getattr(owner, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    return 0


def known_shape(model: nn.Module, path: str) -> Shape:
    """The widths of the layer at a path.

    Raises:
        ConfigError: there is none that can be sliced.
    """
    found = child(model, path)
    shape = shape_of(found)
    if shape is None:
        msg = f"{path} is {type(found).__name__}, no plain linear layer that can be cut"
        raise ConfigError(msg)
    return shape
