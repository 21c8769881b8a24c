"""Choice of the layers of a model to be quantized, by their kind, their place and their names."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.inference.quantized.experts import expert_inputs, expert_tensors
from mpispeed.inference.quantized.layers import (
    Format,
    check_groups,
    is_table,
    is_transposed,
    quantized_class,
    reason_to_keep,
)
from mpispeed.inference.quantized.options import QuantOptions, Rule
from mpispeed.nn.tensor import RowLinear
from mpispeed.nn.tensor.tensor_cut import marks_of

# names of layers, as models have them
_QKV = frozenset(
    ("q", "k", "v", "qkv", "q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_proj", "key_proj",
     "value_proj", "q_lin", "k_lin", "v_lin", "to_q", "to_k", "to_v", "wq", "wk", "wv", "Wqkv", "wqkv", "c_attn",
     "in_proj", "to_qkv", "query_key_value", "W_pack")
)  # fmt: skip
_MLP = frozenset(
    ("mlp", "ffn", "ff", "feed_forward", "DenseReluDense", "fc1", "fc2", "fc_in", "fc_out", "c_fc", "wi", "wi_0",
     "wi_1", "w1", "w2", "w3", "lin1", "lin2", "linear1", "linear2", "gate_proj", "up_proj", "down_proj",
     "gate_up_proj", "dense_h_to_4h", "dense_4h_to_h", "intermediate", "experts", "block_sparse_moe")
)  # fmt: skip
_ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))


@dataclass(slots=True)
class Choice:
    """The layers of a model.

    Attributes:
        formats: path of each layer to be quantized -> how.
        experts: path of each module with the tensors of experts -> name of the tensor -> how.
        same: path of a layer -> the layer whose weight it shares and that comes first.
        whole: path of each other layer that could be quantized -> why it is not.
    """

    formats: dict[str, Format] = field(default_factory=dict)
    experts: dict[str, dict[str, Format]] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def choose(model: nn.Module, options: QuantOptions) -> Choice:
    """The layers to be quantized, in the order of the model.

    Raises:
        ConfigError: a layer matches two of the names in `options`, or a name matches none.
    """
    choice, users, unused = Choice(), dict[int, list[str]](), {text for text, _ in options.named}
    blocks = _blocks(model)
    for path, module in model.named_modules():
        if names := expert_tensors(module):
            _choose_experts(choice, path, module, names, options, _named(path, options, unused))
            continue
        if quantized_class(module) is None:
            if kind := _unknown_kind(module):
                choice.whole[path] = kind
            continue
        rule = _named(path, options, unused)
        why = reason_to_keep(module) or ("" if rule else _why_not(path, module, options, blocks))
        if why:
            choice.whole[path] = why
        else:
            choice.formats[path] = _format_of_rule(path, module, rule) if rule else _format(path, module, options)
    _settle_shared(model, choice, users)
    if unused:
        known = [path for path, module in model.named_modules() if quantized_class(module)]
        msg = f"post_init_quant.{min(unused)} is in the path of no layer; there are {', '.join(known[:4])} and others"
        raise ConfigError(msg)
    return choice


def _choose_experts(
    choice: Choice, path: str, module: nn.Module, names: tuple[str, ...], options: QuantOptions, rule: Rule | None
) -> None:
    skipped = next((text for text in options.skip if text in path), "")
    if rule is not None:
        if rule.group_dim == 0:
            msg = f"post_init_quant: group_dim is 0 for {path}; experts have groups of inputs only: use 1"
            raise ConfigError(msg)
        how = Format(rule.bits, rule.group_size, is_symmetric=rule.symmetric, is_exact=True)
        for name in names:
            check_groups(f"{path}.{name}", module.get_parameter(name).shape[2], how)
        choice.experts[path] = dict.fromkeys(names, how)
    elif options.only_named or not options.experts or skipped:
        why = f"skipped by {skipped!r}" if skipped else "no rule names it" if options.only_named else "experts"
        choice.whole[path] = why
    else:
        sizes = {name: options.group_of(expert_inputs(module, name), is_mlp=True) for name in names}
        choice.experts[path] = {
            name: Format(options.bits, size, is_symmetric=options.symmetric) for name, size in sizes.items()
        }


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the lists of blocks; empty for a model without."""
    return tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and path)


def _unknown_kind(module: nn.Module) -> str:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return f"{type(module).__name__} has its own forward"
    return ""


def _named(path: str, options: QuantOptions, unused: set[str]) -> Rule | None:
    """The rule whose text is in the path."""
    found = [(text, rule) for text, rule in options.named if text in path]
    if len(found) > 1:
        texts = " and ".join(text for text, _ in found)
        msg = f"post_init_quant: {path} matches {texts}; keep one of them for it"
        raise ConfigError(msg)
    unused.difference_update(text for text, _ in found)
    return found[0][1] if found else None


def _why_not(path: str, module: nn.Module, options: QuantOptions, blocks: tuple[str, ...]) -> str:
    """Why a layer without a rule is left out; "" if it is not."""
    name = path.rpartition(".")[2]
    skipped = next((text for text in options.skip if text in path), "")
    reasons = {
        "no rule names it": options.only_named,
        f"skipped by {skipped!r}": bool(skipped),
        "an embedding": is_table(module) and not options.embeddings,
        "outside of the blocks": not is_table(module) and not options.heads and not _is_inside(path, blocks),
        "a router of experts": name in _ROUTERS,
        "queries, keys and values are left out": not options.qkv and name in _QKV,
        f"fewer than {options.least} elements": _elements(module) < options.least,
    }
    return next((why for why, is_true in reasons.items() if is_true), "")


def _is_inside(path: str, blocks: tuple[str, ...]) -> bool:
    """True if the layer belongs to a block. Models without blocks have only a layer to logits, by name, outside."""
    if blocks:
        return path.startswith(blocks)
    return path.rpartition(".")[2] not in ("lm_head", "embed_out", "output_projection")


def _format(path: str, module: nn.Module, options: QuantOptions) -> Format:
    is_mlp = is_in_mlp(path)
    return Format(
        options.bits, options.group_of(_inputs(module), is_mlp=is_mlp), is_symmetric=options.symmetric,
    )  # fmt: skip


def _format_of_rule(path: str, module: nn.Module, rule: Rule) -> Format:
    """`group_dim` counts the dims of the weight as the layer has it."""
    how = Format(
        rule.bits, rule.group_size, is_along_inputs=(rule.group_dim == 1) != is_transposed(module),
        is_symmetric=rule.symmetric, is_exact=True,
    )  # fmt: skip
    check_groups(path, module.get_parameter("weight").shape[rule.group_dim], how)
    return how


def _inputs(module: nn.Module) -> int:
    """Inputs of a linear layer, of the full one where they are sliced; the width of a table."""
    if isinstance(module, RowLinear):
        return module.in_features
    weight: Any = module._parameters["weight"]
    return int(weight.shape[0 if is_transposed(module) else 1])


def _elements(module: nn.Module) -> int:
    """Of the weight; of the full one where it is sliced, so that all ranks choose the same."""
    weight: Any = module._parameters["weight"]
    cut = marks_of(module).cuts.get("weight")
    return math.prod(cut.shape) if cut is not None else int(weight.numel())


def is_in_mlp(path: str) -> bool:
    """True if a layer belongs to an MLP, by its names."""
    parts = path.split(".")
    is_bert_output = parts[-2:] == ["output", "dense"] and "attention" not in parts
    return is_bert_output or not _MLP.isdisjoint(parts)


def _settle_shared(model: nn.Module, choice: Choice, users: dict[int, list[str]]) -> None:
    """A weight that several layers share is coded once, and only if all of them are to be quantized."""
    for path, module in model.named_modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                users.setdefault(id(weight), []).append(path if name == "weight" else f"{path}.{name}")
    for paths in users.values():
        chosen = [path for path in paths if path in choice.formats]
        if len(paths) < 2 or not chosen:
            continue
        other = next((path for path in paths if path not in choice.formats), None)
        for path in chosen:
            if other is not None:
                del choice.formats[path]
                choice.whole[path] = f"its weight is that of {other}, too"
            elif path != chosen[0]:
                del choice.formats[path]
                choice.same[path] = chosen[0]
