"""Plan of slicing: column-parallel layers and the row-parallel one behind them. Plain data, equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.tensor.carried import plain_type
from mpispeed.nn.tensor.tensor_cut import Ranges

#: layout of the outputs of a column-parallel layer
FORMS = ("column", "qkv", "kv", "interleaved", "gate_up")

# names of layers with query, key and value, one behind the other, or those of each head together
FUSED = ("qkv_proj", "qkv", "c_attn", "Wqkv", "wqkv", "W_pack", "in_proj", "to_qkv")
INTERLEAVED = ("query_key_value",)


def form_of(path: str) -> str:
    """The form that the outputs of a layer of this name have."""
    name = path.rpartition(".")[2]
    if name in FUSED:
        return "qkv"
    return {"gate_up_proj": "gate_up"}.get(name, "interleaved" if name in INTERLEAVED else "column")


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model over ranks.

    Attributes:
        size: ranks to slice for.
        grain: widths that are no heads are sliced at multiples of it, if every rank gets one.
        forward_only: nobody wants gradients, nor dropout. With fewer keys than ranks several ranks get the same one.
    """

    size: int
    grain: int = 1
    forward_only: bool = False

    def grain_of(self, width: int) -> int:
        """The grain at which `width` is sliced."""
        return self.grain if width >= self.grain * self.size else 1


@dataclass(frozen=True, slots=True)
class Column:
    """A layer sliced by its outputs, with arguments of `ColumnLinear`.

    Attributes:
        path: of the layer in the model.
        sub_sizes: as of `ColumnLinear`.
        grains: likewise.
        ranges: likewise.
    """

    path: str
    sub_sizes: tuple[int, ...] = ()
    grains: tuple[int, ...] = ()
    ranges: Ranges = ()


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A tensor of all heads that meets this rank's heads.

    Attributes:
        module: path below the holder; "" for itself.
        argument: of this name, [batch * heads, ...]; "" for the module's output, [..., heads].
    """

    module: str = ""
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """One region between column-parallel layers and a row-parallel one.

    Attributes:
        scope: path of the module that contains all of it.
        holder: path of the module whose forward is between them, and has the numbers of heads.
        columns: layers that are sliced by their outputs.
        row: path of the layer that is sliced by its inputs and sums; "" for none, then outputs are gathered.
        grain: its share of the inputs is a multiple of it.
        ranges: of its inputs, where they are no such shares; empty else.
        heads: range [start, stop) of query heads on each rank; empty for no attention.
        attributes: (name, value on each rank) of numbers that the holder keeps.
        narrowed: tensors of all heads.
        after: dropouts of the holder that come behind the row-parallel layer.
        partial: names in the scope of replicated parameters that every head uses.
        source: how it was found.
        takes_whole: the row-parallel layer gets all inputs on every rank, and takes its part.
    """

    scope: str
    holder: str
    columns: tuple[Column, ...]
    row: str
    grain: int = 1
    ranges: Ranges = ()
    heads: tuple[tuple[int, int], ...] = ()
    attributes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    narrowed: tuple[Narrowed, ...] = ()
    after: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    source: str = ""
    takes_whole: bool = False


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
    if plain_type(module) is nn.Linear:
        linear: Any = module
        return Shape(linear.in_features, linear.out_features, False)
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
    model: nn.Module, scope: str, columns: Mapping[str, str], row: str, division: Division, *, source: str = ""
) -> Site:
    """A site without heads.

    Args:
        model: the whole model.
        scope: path of the module that contains the layers.
        columns: path of each -> its form.
        row: path of the row-parallel layer.
        division: how.
        source: for the report.

    Raises:
        ConfigError: widths do not fit.
    """
    inner = known_shape(model, row).inputs
    grain, made = division.grain_of(inner), []
    for path, form in columns.items():
        outputs, parts = known_shape(model, path).outputs, 2 if form == "gate_up" else 1
        if outputs != parts * inner or form not in ("column", "gate_up"):
            msg = f"{path} ({form}) has {outputs} outputs, and {row} behind it {inner} inputs: they cannot be cut alike"
            raise ConfigError(msg)
        made.append(Column(path, (inner,) * parts if parts > 1 else (), (grain,) * parts))
    holder = next(iter(columns)).rpartition(".")[0]
    return Site(scope, holder, tuple(made), row, grain, source=source)


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
