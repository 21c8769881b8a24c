"""Policies of slicing: a table of known models, tables of users, and the layers that belong together in either."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.tensor.attention_plan import TooFewHeadsError, attention_site
from mpispeed.nn.tensor.shard_plan import (
    FORMS,
    Column,
    Division,
    Site,
    child,
    common,
    join,
    known_shape,
    mlp_site,
    shape_of,
)

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

_LLAMAS = ("Llama", "Mistral", "Qwen2", "Mixtral")
_BERTS = ("Bert", "Roberta")
_SELF = {"self.query": "column", "self.key": "column", "self.value": "column"}

TABLE = (
    Row("GPT2Attention", {"q_attn": "column", "c_attn": "kv"}, "c_proj", True, ("resid_dropout",)),
    Row("GPT2Attention", {"c_attn": "qkv"}, "c_proj", True, ("resid_dropout",)),
    Row("GPT2MLP", {"c_fc": "column"}, "c_proj"),
    *(Row(f"{name}Attention", _QKV, "o_proj", True) for name in _LLAMAS),
    *(Row(f"{name}MLP", _GATED, "down_proj") for name in _LLAMAS),
    *(Row(f"{name}Attention", _SELF, "output.dense", True) for name in _BERTS),
    *(Row(f"{name}Layer", {"intermediate.dense": "column"}, "output.dense") for name in _BERTS),
    Row("OPTAttention", _QKV, "out_proj", True),
    Row("OPTDecoderLayer", {"fc1": "column"}, "fc2"),
    Row("GPTNeoSelfAttention", _QKV, "out_proj", True, ("resid_dropout",)),
    Row("GPTNeoMLP", {"c_fc": "column"}, "c_proj"),
    Row("GPTJAttention", _QKV, "out_proj", True, ("resid_dropout",)),
    Row("GPTJMLP", {"fc_in": "column"}, "fc_out"),
    Row("BloomAttention", {"query_key_value": "interleaved"}, "dense", True),
    Row("BloomMLP", {"dense_h_to_4h": "column"}, "dense_4h_to_h"),
    Row("T5Attention", {"q": "column", "k": "column", "v": "column"}, "o", True),
    Row("T5DenseActDense", {"wi": "column"}, "wo"),
    Row("T5DenseGatedActDense", {"wi_0": "column", "wi_1": "column"}, "wo"),
)


def known_sites(model: nn.Module, division: Division) -> Iterator[Site]:
    """The sites that the table knows.

    Raises:
        ConfigError: one of them cannot be sliced for so many ranks.
    """
    for path, module in model.named_modules():
        names = {base.__name__ for base in type(module).__mro__}
        for row in TABLE:
            parts = [*row.columns, row.row]
            if row.scope in names and all(shape_of(child(module, part)) for part in parts):
                columns = {join(path, part): form for part, form in row.columns.items()}
                options = (model, path, columns, join(path, row.row), division)
                if row.has_heads:
                    yield attention_site(*options, after=row.after, source=row.scope)
                else:
                    yield mlp_site(*options, source=row.scope)
                break


@dataclass(slots=True)
class Chosen:
    """Layers of a model named by a policy.

    Attributes:
        sites: regions that are sliced.
        vocab: paths of embeddings and layers to logits that are sliced by vocabulary.
        whole: path of each layer or module that is not sliced -> the reason.
    """

    sites: list[Site] = field(default_factory=list)
    vocab: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


def chosen_sites(model: nn.Module, table: Mapping[str, str], division: Division) -> Chosen:
    """The sites of a user's table.

    A key is the end of a layer's path ("mlp.fc1"), or, with any of the characters of regular expressions in it, an
    expression that matches whole paths. Of several keys the first that fits counts.

    Args:
        model: the whole model.
        table: key -> one of `KINDS`.
        division: how to slice.

    Raises:
        ConfigError: a kind is unknown, a key fits to no layer, a row-parallel layer has no column-parallel one before
            it, or widths do not fit.
    """
    kinds = _match(model, table)
    made = _joined(model, kinds, division, lambda columns, row: _is_named_attention(columns), "policy")
    made.vocab += [path for path, kind in kinds.items() if kind == "vocab"]
    made.whole |= {path: "policy" for path, kind in kinds.items() if kind == "whole"}
    return made


def joined_sites(
    model: nn.Module, kinds: Mapping[str, str], division: Division, source: str, *, is_strict: bool = True
) -> Chosen:
    """The sites of layers whose kinds are known, where nobody says what is attention: names and widths do.

    Args:
        model: the whole model.
        kinds: path -> a form, "row", or "split" for a row-parallel layer behind full inputs; in the model's order.
        division: how to slice.
        source: for the report.
        is_strict: raise what does not fit; else leave it whole.

    Raises:
        ConfigError: see `chosen_sites`; attention has fewer heads than ranks.
    """

    def is_attention(columns: Mapping[str, str], row: str) -> bool:
        shapes = [known_shape(model, path).outputs for path, form in columns.items() if form == "column"]
        is_even = all(outputs == known_shape(model, row).inputs for outputs in shapes)
        return _is_named_attention(columns) or not is_even or re.search("attn|attention", row.lower()) is not None

    return _joined(model, kinds, division, is_attention, source, is_strict=is_strict)


def _joined(
    model: nn.Module,
    kinds: Mapping[str, str],
    division: Division,
    is_attention: Callable[[Mapping[str, str], str], bool],
    source: str,
    *,
    is_strict: bool = True,
) -> Chosen:
    made = Chosen()
    groups, alone = _grouped(kinds)
    for path in alone:
        if kinds[path] == "column":
            made.sites.append(Site(path, path, (Column(path),), "", source=source))
        elif is_strict:
            msg = (
                f"{path} is {kinds[path]!r} in the policy, and no row-cut layer follows: only 'column' can be gathered"
            )
            raise ConfigError(msg)
    for path in (path for path, kind in kinds.items() if kind == "split"):
        made.sites.append(Site(path, path, (), path, source=source, takes_whole=True))
    for row, columns in groups.items():
        try:
            made.sites.append(_site(model, columns, row, division, is_attention, source))
        except TooFewHeadsError:
            raise
        except ConfigError as problem:
            if is_strict:
                raise
            made.whole[common([*columns, row])] = str(problem)
    return made


def _site(
    model: nn.Module,
    columns: Mapping[str, str],
    row: str,
    division: Division,
    is_attention: Callable[[Mapping[str, str], str], bool],
    source: str,
) -> Site:
    if not columns:
        msg = f"{row} is 'row' in the policy, but no column-cut layer before it gives it its inputs; name one"
        raise ConfigError(msg)
    make = attention_site if is_attention(columns, row) else mlp_site
    return make(model, common([*columns, row]), columns, row, division, source=source)


def _grouped(kinds: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """(row-parallel layer -> column-parallel layers before it with their forms, column-parallel layers without one)."""
    rows = [path for path, kind in kinds.items() if kind == "row"]
    order = {path: place for place, path in enumerate(kinds)}
    groups: dict[str, dict[str, str]] = {row: {} for row in rows}
    alone = []
    for path, kind in kinds.items():
        if kind not in FORMS:
            continue
        nearness = {row: _nearness(path, row, order) for row in rows}
        row = max(rows, key=nearness.__getitem__, default="")
        if row and (order[row] > order[path] or row.rpartition(".")[0] == path.rpartition(".")[0]):
            groups[row][path] = kind
        else:
            alone.append(path)
    return groups, alone


def _is_named_attention(columns: Mapping[str, str]) -> bool:
    return len(columns) >= 3 or bool({"qkv", "kv", "interleaved"} & set(columns.values()))


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
