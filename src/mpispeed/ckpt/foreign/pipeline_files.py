"""Joining of model-parallel ranks: slices of tensor parallelism, stages and layer files of pipelines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch
from mpispeed.ckpt.foreign.folders import RankFiles
from mpispeed.ckpt.foreign.found import MASTER, WEIGHT16, Found, FoundParam, ReadOptions
from mpispeed.ckpt.foreign.pickles import Inert
from mpispeed.ckpt.foreign.slices import Merger
from mpispeed.ckpt.foreign.values import Plain, Rounded, are_equal

_INFO = "universal_checkpoint_info"
_TIED = "tied_modules."


def join_slices(folder: Path, parts: Sequence[Found], options: ReadOptions, size: int) -> Found:
    """Join the slices of `size` tensor-parallel ranks into one checkpoint.

    Raises:
        ForeignMismatch: the ranks have different parameters, or how they fit together is not known.
    """
    whole = parts[0]
    whole.path = folder
    if size == 1:
        return whole
    for rank, other in enumerate(parts[1:], 1):
        differing = sorted(whole.params.keys() ^ other.params.keys())
        if differing:
            msg = f"{folder}: {differing[0]!r} is on model-parallel rank 0 or on rank {rank}, but not on both"
            raise ForeignMismatch(msg)
    merger = Merger(options.tp_patterns, _info(whole))
    whole.params = {name: merger.merge([part.params[name] for part in parts]) for name in whole.params}
    whole.layout["tensor"] = size
    return whole


def _info(found: Found) -> Mapping[str, Any] | None:
    info = found.client.get(_INFO)
    if isinstance(info, Inert):
        return info.fields
    return info if isinstance(info, Mapping) else None


def join(files: RankFiles, shares: Sequence[tuple[Found, dict[str, Any]]], options: ReadOptions) -> Found:
    """Join a pipeline into one checkpoint: parts of all its ranks, and a file per layer.

    Names of layer files begin with the number of the layer.

    Raises:
        ForeignIncomplete: a layer lacks a slice.
        ForeignMismatch: copies differ, or how slices fit together is not known.
    """
    size = max(tensor for _, tensor in files.layers) + 1
    if len(shares) % size:
        msg = f"{files.folder} has {len(shares)} model-parallel ranks, which layers of {size} slices do not divide"
        raise ForeignIncomplete(msg)
    if any(model.get("optimizer") for _, model in shares) and not options.weights_only:
        msg = (
            f"{files.folder}: the optimizer state of a pipeline that is not partitioned does not say which layer it is "
            "of; import with --weights-only"
        )
        raise ForeignMismatch(msg)
    groups = [shares[start : start + size] for start in range(0, len(shares), size)]
    parts = [join_slices(files.folder, [found for found, _ in group], options, size) for group in groups]
    whole = parts[0]
    for other in parts[1:]:
        _take_part(whole, other)
    buffers = {name for _, model in shares for name in model["buffer_names"]}
    merger = Merger(options.tp_patterns, _info(whole))
    for layer in sorted({layer for layer, _ in files.layers}):
        _take_layer(whole, _layer_slices(files, layer, size), layer, merger, (buffers, options))
    whole.layout["pipe"] = len(groups)
    return whole


def _take_part(whole: Found, other: Found) -> None:
    """Add the part of the next pipeline ranks; weights tied to earlier layers have to be equal."""
    if len(other.groups) != len(whole.groups):
        msg = f"{whole.path}: parts of the pipeline have {len(whole.groups)} and {len(other.groups)} parameter groups"
        raise ForeignMismatch(msg)
    for name, param in other.params.items():
        if name not in whole.params:
            whole.add(param)
        elif not are_equal(whole.params[name].weight, param.weight):
            msg = f"{whole.path}: the copies of {name!r} differ between ranks of the pipeline"
            raise ForeignMismatch(msg)
    whole.buffers |= other.buffers
    whole.aliases |= other.aliases
    whole.left_out += [text for text in other.left_out if text not in whole.left_out]


def _layer_slices(files: RankFiles, layer: int, size: int) -> list[dict[str, Any]]:
    contents = []
    for tensor in range(size):
        path = files.layers.get((layer, tensor))
        if path is None:
            msg = f"{files.folder} has no file of slice {tensor} of layer {layer}, but others of that layer"
            raise ForeignIncomplete(msg)
        content = torch_files.read(path)
        if not isinstance(content, Mapping):
            msg = f"{path} holds a {type(content).__name__} where the state of a layer is expected"
            raise ForeignCorrupt(msg)
        contents.append({key: value for key, value in content.items() if isinstance(value, torch.Tensor)})
    return contents


def _take_layer(
    whole: Found, slices: Sequence[dict[str, Any]], layer: int, merger: Merger, more: tuple[set[str], ReadOptions]
) -> None:
    buffers, options = more
    for key, first in slices[0].items():
        name = f"{layer}.{key}"
        if name in whole.params:
            whole.params[name].train_dtype = first.dtype
            continue
        if name in buffers or not first.is_floating_point() or re.search(options.buffers, name):
            whole.add_buffer(name, first)
            continue
        tensors = [own.get(key) for own in slices]
        if any(tensor is None for tensor in tensors):
            msg = f"{whole.path}: {name!r} is not in all slices of layer {layer}"
            raise ForeignIncomplete(msg)
        is_frozen = bool(whole.groups) or bool(options.frozen and re.search(options.frozen, name))
        slot = MASTER if first.dtype in (torch.float32, torch.float64) and not is_frozen else WEIGHT16
        made = [
            FoundParam(name, tuple(t.shape), t.dtype, {slot: Plain(t)}, is_frozen) for t in tensors if t is not None
        ]
        param = made[0] if len(made) == 1 else merger.merge(made)
        tied = _tied_to(whole, key, param)
        if tied is None:
            whole.add(param)
        else:
            tied.train_dtype = param.train_dtype


def _tied_to(whole: Found, key: str, param: FoundParam) -> FoundParam | None:
    """The tied parameter that this entry of a layer file is a copy of, if it is one."""
    for name, other in whole.params.items():
        is_named = name.startswith(_TIED) and name.endswith(f".{key}") and other.shape == param.shape
        if is_named and are_equal(Rounded(other.weight, param.weight.dtype), param.weight):
            return other
    return None
