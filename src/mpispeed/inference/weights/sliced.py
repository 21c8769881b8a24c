"""Tensors of which files of several ranks have slices, as Megatron and DeepSpeed save them.

Source: DeepSpeed 0.16.5, `MegatronSDLoader`: which tensors are sliced along which dim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign import torch_files
from mpispeed.ckpt.foreign.found import Found, ReadOptions, take_state_dict
from mpispeed.ckpt.foreign.mapping import noted
from mpispeed.ckpt.foreign.opening import open_foreign
from mpispeed.ckpt.foreign.values import Values
from mpispeed.inference.weights.policy import Policy
from mpispeed.inference.weights.sources import Shard, Sliced, Source, Sources, of_found
from mpispeed.nn.tensor import TensorCut

_FUSED = re.compile(r"query_key_value\.(weight|bias)$")
_PADDED = re.compile(r"(embed|lm_head|wte|output_layer)")


def of_policy(policy: Policy, options: ReadOptions, where: str) -> Sources:
    """The tensors of all files of a policy.

    Raises:
        CheckpointError: a file is missing, damaged, or has other tensors than those of other ranks.
    """
    made = Sources(Path(where))
    for path in policy.whole:
        made.join(_of_file(path, options, policy)[0])
    for group in policy.groups:
        parts = [_of_file(path, options, policy) for path in group]
        version = policy.version
        for path, (_, facts) in zip(group, parts, strict=True):
            size = facts.get("mp_world_size")
            if size not in (None, len(group)):
                msg = f"{path} is of {size} ranks (mp_world_size), and the load policy names {len(group)} files"
                raise CheckpointError(msg)
            version = float(facts.get("checkpoint_version") or 0) if version is None else version
        _join(made, [sources for sources, _ in parts], group, version or 0.0)
    return made


def _of_file(path: Path, options: ReadOptions, policy: Policy) -> tuple[Sources, Mapping[str, Any]]:
    """The tensors of a file, and what stands beside them."""
    with noted() as notes:
        if policy.kind != "megatron" or path.suffix == ".safetensors":
            return of_found(open_foreign(path, None, options), notes), {}
        content = torch_files.read(path)
        keys = [key for key in ("module", "model") if isinstance(content, Mapping) and key in content]
        if len(keys) != 1 or not isinstance(content[keys[0]], Mapping):
            has = " and ".join(keys) or "neither"
            msg = f"{path} needs weights under either 'module' or 'model'; it has {has}"
            raise CheckpointError(msg)
        found = Found(path, "torch")
        take_state_dict(found, dict(_flat(content[keys[0]], "", 0)), options, frozenset())
        found.check()
        return of_found(found, notes), {key: value for key, value in content.items() if key not in keys}


def _flat(tree: Mapping[Any, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and depth < 8:
            yield from _flat(value, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def _join(made: Sources, parts: Sequence[Sources], group: Sequence[Path], version: float) -> None:
    first = parts[0]
    for path, part in zip(group, parts, strict=True):
        odd = sorted(first.by_name.keys() ^ part.by_name.keys())
        if odd:
            msg = f"{group[0]} and {path} are slices of the same tensors, and only one of them has {odd[0]!r}"
            raise CheckpointError(msg)
    for name in first.by_name:
        own = [each for part in parts if isinstance(each := part.by_name[name], Source)]
        if len(own) == 1:
            made.add_source(own[0])
        else:
            slices = tuple((each.shape, each.whole) for each in own)
            made.add_source(Sliced(name, slices, own[0].dtype, own[0].where, version))
    for part in parts:
        made.aliases |= part.aliases
        made.sums |= part.sums
        made.states |= part.states


def joined(sliced: Sliced, shape: tuple[int, ...], cut: TensorCut | None) -> Source:
    """The whole tensor.

    Args:
        sliced: its slices, in the order of ranks.
        shape: that it has in the model.
        cut: its slicing there; None where it is whole.

    Raises:
        CheckpointError: the slices do not make it up.
    """
    shapes, size = [part for part, _ in sliced.slices], len(sliced.slices)
    if all(part == shape for part in shapes):  # the same on all ranks; the first is taken, as by DeepSpeed
        return Source(sliced.name, shape, sliced.dtype, (_whole(sliced.slices[0][1], shape),), 0, sliced.where)
    is_fused = _FUSED.search(sliced.name) is not None
    if cut is not None and not is_fused and _fits(cut, shapes):
        shards = [
            Shard(values, tuple(cut.ranges(rank, size)), part[cut.dim])
            for rank, (part, values) in enumerate(sliced.slices)
        ]
        return Source(sliced.name, shape, sliced.dtype, tuple(shards), cut.dim, sliced.where)
    dim = _dim(sliced, shapes, shape)
    shards, begin, third = [], 0, shape[dim] // 3
    for part, values in sliced.slices:
        stop = begin + part[dim]
        ranges: tuple[tuple[int, int], ...] = ((min(begin, shape[dim]), min(stop, shape[dim])),)
        if is_fused and dim == 0 and sliced.version == 0:  # each of query, key and value is sliced by itself
            ranges = tuple((begin // 3 + third * number, stop // 3 + third * number) for number in range(3))
        shards.append(Shard(values, ranges, part[dim]))
        begin = stop
    return Source(sliced.name, shape, sliced.dtype, tuple(shards), dim, sliced.where)


def _whole(values: Values, shape: tuple[int, ...]) -> Shard:
    length = shape[0] if shape else 1
    return Shard(values, ((0, length),), length)


def _fits(cut: TensorCut, shapes: Sequence[tuple[int, ...]]) -> bool:
    if cut.kind == "own" and len(cut.sub_sizes) != len(shapes):
        return False
    return all(cut.local_shape(rank, len(shapes)) == part for rank, part in enumerate(shapes))


def _dim(sliced: Sliced, shapes: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    for dim in range(len(shape)):
        total = sum(part[dim] for part in shapes if len(part) == len(shape))
        is_alike = all(part[:dim] + part[dim + 1 :] == shape[:dim] + shape[dim + 1 :] for part in shapes)
        is_padded = dim == 0 and total > shape[0] and _PADDED.search(sliced.name) is not None
        if is_alike and (total == shape[dim] or is_padded):
            return dim
    msg = (
        f"{sliced.where}: the slices of {sliced.name!r} of the shapes {', '.join(map(str, shapes))} make up no tensor "
    )
    msg += f"of shape {shape}, as the model has it"
    raise CheckpointError(msg)
