"""Choice of the embeddings and layers to logits that are sliced by vocabulary, with layers that share their tables."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor.apply import AT_HAND, Layers, sliced
from mpispeed.nn.tensor.carried import plain_type
from mpispeed.nn.tensor.embedding import VocabEmbedding, VocabLinear
from mpispeed.nn.tensor.linear import CutLayer
from mpispeed.nn.tensor.shard_plan import shape_of
from mpispeed.nn.tensor.tensor_cut import cuts, marks_of


def vocab_paths(model: Any) -> list[str]:
    """The embedding of tokens and the layer to logits, as models of `transformers` name them.

    Raises:
        ConfigError: the model does not name them.
    """
    paths = told_paths(model)
    if not paths:
        msg = f"vocab: {type(model).__name__} does not tell its embedding of tokens (get_input_embeddings); name the "
        msg += 'layers in a policy, e.g. {"embed": "vocab", "head": "vocab"}'
        raise ConfigError(msg)
    return paths


def told_paths(model: Any) -> list[str]:
    """As `vocab_paths`; empty if the model does not name them."""
    tables = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        with contextlib.suppress(NotImplementedError):  # as models of transformers without one answer
            tables.append(getattr(model, name, lambda: None)())
    return [path for path, module in model.named_modules() if any(module is table for table in tables)]


def together(model: nn.Module, paths: list[str]) -> tuple[list[str], dict[str, str]]:
    """Groups of layers with one table: all sliced, or none if one of them is no plain layer.

    Returns:
        (paths of layers to slice, path -> reason not to)
    """
    chosen: list[str] = []
    whole: dict[str, str] = {}
    for table in {id(model.get_submodule(path)._parameters.get("weight")): None for path in paths}:
        users = [path for path, module in model.named_modules() if id(module._parameters.get("weight")) == table]
        odd = next((path for path in users if not _can_be_cut(model.get_submodule(path))), None)
        if odd is None:
            chosen += users
        else:
            kind = type(model.get_submodule(odd)).__name__
            whole |= {path: f"the table belongs to {odd} ({kind}), which is no plain layer" for path in users}
    return chosen, whole


def _can_be_cut(module: nn.Module) -> bool:
    """True for an embedding or a linear layer that can be sliced by vocabulary."""
    if isinstance(module, nn.Embedding) and _scale_of(module) is not None:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return plain_type(module) is nn.Linear and shape_of(module) is not None


def _scale_of(table: nn.Embedding) -> float | None:
    """What a plain embedding, or one of transformers with a factor, multiplies its rows with; None: another kind."""
    if plain_type(table) is nn.Embedding:
        return 1.0
    if not type(table).__name__.endswith("ScaledWordEmbedding"):
        return None
    found = getattr(table, "scalar_embed_scale", getattr(table, "embed_scale", None))
    return float(found) if isinstance(found, (int, float)) else None


def cut_vocab(model: nn.Module, path: str, comm: Comm, layers: Layers = AT_HAND) -> None:
    """Replace the layer at a path by its sliced form. Local, unless full parameters are elsewhere."""
    old = model.get_submodule(path)
    owner, _, name = path.rpartition(".")
    parent: Any = model.get_submodule(owner)
    made = sliced(layers, old, partial(_sliced, old, comm))
    made.train(old.training)
    parent._modules[name] = made


def _sliced(old: Any, comm: Comm) -> CutLayer:
    if isinstance(old, nn.Embedding):
        options: dict[str, Any] = {"scale": _scale_of(old), "rounds_scale": hasattr(old, "scalar_embed_scale")}
        return VocabEmbedding(old.num_embeddings, old.embedding_dim, comm, whole=old, **options)
    return VocabLinear(old.in_features, old.out_features, comm, bias=old.bias is not None, whole=old)


def retie(model: nn.Module, before: Mapping[str, nn.Module]) -> None:
    """Tie again the layers and parameters that were shared before: an embedding with the layer to logits."""
    after = dict(model.named_modules())
    layers = {id(old): after[path] for path, old in before.items() if path in after and after[path] is not old}
    for module in after.values():
        for name, part in module._modules.items():
            if id(part) in layers:
                module._modules[name] = layers[id(part)]
    replaced: dict[int, tuple[nn.Parameter, Any]] = {}
    known = cuts(model)
    for path, module in model.named_modules():
        old = before.get(path)
        for name, param in module.named_parameters(recurse=False):
            was = None if old is None else old._parameters.get(name)
            if was is not None and was is not param:
                replaced.setdefault(id(was), (param, known[f"{path}.{name}"]))
    for path, module in model.named_modules():
        for name in list(module._parameters):
            old = before.get(path)
            was = None if old is None else old._parameters.get(name)
            if id(was) in replaced:
                param, cut = replaced[id(was)]
                module._parameters[name] = param
                marks_of(module).cuts[name] = cut
