"""Policies of slicing: a table of known models, and tables of users."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.tensor.shard_plan import FORMS, Column, Site, attention_site, child, common, join, mlp_site, shape_of

#: what a user's table may say of a layer
KINDS = (*FORMS, "row", "vocab", "whole")

_IS_PATTERN = re.compile(r"[\\^$*+?\[\](){}|]")


@dataclass(frozen=True, slots=True)
class Row:
    """One module of known models.

    Attributes:
        scope: name of its class, or of a base class.
        columns: path below it of each layer that is sliced by outputs -> form.
        row: path of the layer behind them.
        has_heads: True for attention.
        after: dropouts of the module that come behind the row-parallel layer.
    """

    scope: str
    columns: Mapping[str, str]
    row: str
    has_heads: bool = False
    after: tuple[str, ...] = ()


_QKV = {"q_proj": "column", "k_proj": "column", "v_proj": "column"}
_GATED = {"gate_proj": "column", "up_proj": "column"}

TABLE = (
    Row("GPT2Attention", {"q_attn": "column", "c_attn": "kv"}, "c_proj", True, ("resid_dropout",)),
    Row("GPT2Attention", {"c_attn": "qkv"}, "c_proj", True, ("resid_dropout",)),
    Row("GPT2MLP", {"c_fc": "column"}, "c_proj"),
    *(Row(f"{name}Attention", _QKV, "o_proj", True) for name in ("Llama", "Mistral", "Qwen2")),
    *(Row(f"{name}MLP", _GATED, "down_proj") for name in ("Llama", "Mistral", "Qwen2")),
    Row(
        "BertAttention",
        {"self.query": "column", "self.key": "column", "self.value": "column"},
        "output.dense",
        True,
    ),
    Row("BertLayer", {"intermediate.dense": "column"}, "output.dense"),
    Row("OPTAttention", _QKV, "out_proj", True),
    Row("OPTDecoderLayer", {"fc1": "column"}, "fc2"),
)


def known_sites(model: nn.Module, size: int, grain: int) -> Iterator[Site]:
    """The sites that the table knows.

    Raises:
        ConfigError: one of them cannot be sliced for `size` ranks.
    """
    for path, module in model.named_modules():
        names = {base.__name__ for base in type(module).__mro__}
        for row in TABLE:
            parts = [*row.columns, row.row]
            if row.scope in names and all(shape_of(child(module, part)) for part in parts):
                columns = {join(path, part): form for part, form in row.columns.items()}
                options = (model, path, columns, join(path, row.row))
                if row.has_heads:
                    yield attention_site(*options, size, after=row.after, source=row.scope)
                else:
                    yield mlp_site(*options, grain=grain, source=row.scope)
                break


@dataclass(slots=True)
class Chosen:
    """Layers of a model named by a user's table.

    Attributes:
        sites: regions that are sliced.
        vocab: paths of embeddings and layers to logits that are sliced by vocabulary.
        whole: paths of layers that are not sliced.
    """

    sites: list[Site] = field(default_factory=list)
    vocab: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)


def chosen_sites(model: nn.Module, table: Mapping[str, str], size: int, grain: int) -> Chosen:
    """The sites of a user's table.

    A key is the end of a layer's path ("mlp.fc1"), or, with any of the characters of regular expressions in it, an
    expression that matches whole paths. Of several keys the first that fits counts.

    Args:
        model: the whole model.
        table: key -> one of `KINDS`.
        size: ranks to slice for.
        grain: widths without heads are sliced at multiples of it.

    Raises:
        ConfigError: a kind is unknown, a key fits to no layer, a row-parallel layer has no column-parallel one before
            it, or widths do not fit.
    """
    kinds = _match(model, table)
    rows = [path for path, kind in kinds.items() if kind == "row"]
    order = {path: place for place, path in enumerate(kinds)}
    groups: dict[str, dict[str, str]] = {row: {} for row in rows}
    made = Chosen([], [p for p in kinds if kinds[p] == "vocab"], [p for p in kinds if kinds[p] == "whole"])
    for path, kind in kinds.items():
        if kind not in FORMS:
            continue
        nearness = {row: _nearness(path, row, order) for row in rows}
        row = max(rows, key=nearness.__getitem__, default="")
        is_behind = row and (order[row] > order[path] or row.rpartition(".")[0] == path.rpartition(".")[0])
        if is_behind:
            groups[row][path] = kind
        elif kind == "column":
            made.sites.append(Site(path, path, (Column(path),), "", source="policy"))
        else:
            msg = f"{path} is {kind!r} in the policy, and no row-cut layer follows: only 'column' can be gathered"
            raise ConfigError(msg)
    for row, columns in groups.items():
        if not columns:
            msg = f"{row} is 'row' in the policy, but no column-cut layer before it gives it its inputs; name one"
            raise ConfigError(msg)
        scope = common([*columns, row])
        if len(columns) >= 3 or {"qkv", "kv"} & set(columns.values()):
            made.sites.append(attention_site(model, scope, columns, row, size, source="policy"))
        else:
            made.sites.append(mlp_site(model, scope, columns, row, grain=grain, source="policy"))
    return made


def _nearness(column: str, row: str, order: Mapping[str, int]) -> tuple[int, bool, int]:
    """Score of a row-parallel layer behind a column-parallel one: names in common, whether it follows, how soon."""
    shared = common([column, row])
    distance = order[row] - order[column]
    return (len(shared.split(".")) if shared else 0, distance > 0, -abs(distance))


def _match(model: nn.Module, table: Mapping[str, str]) -> dict[str, str]:
    """Path -> kind, in the order of the model."""
    layers = [path for path, module in model.named_modules() if shape_of(module) or isinstance(module, nn.Embedding)]
    for key, kind in table.items():
        if kind not in KINDS:
            msg = f"policy: {key!r} is {kind!r}; known are {', '.join(KINDS)}"
            raise ConfigError(msg)
        if not any(_fits(key, path) for path in layers):
            near = difflib.get_close_matches(key, {path.split(".", 1)[-1] for path in layers}, 3, 0.3)
            msg = f"policy: {key!r} fits to no layer of {type(model).__name__}; near are {near or layers[:5]}"
            raise ConfigError(msg)
    kinds = ((path, next((kind for key, kind in table.items() if _fits(key, path)), "")) for path in layers)
    return {path: kind for path, kind in kinds if kind}


def _fits(key: str, path: str) -> bool:
    if _IS_PATTERN.search(key):
        try:
            return re.fullmatch(key, path) is not None
        except re.error as error:
            msg = f"policy: {key!r} is no regular expression: {error}"
            raise ConfigError(msg) from None
    return path == key or path.endswith(f".{key}")
