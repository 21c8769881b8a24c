"""fp32 weights of a checkpoint, ours or DeepSpeed's, through functions with DeepSpeed's names."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import CheckpointError
from mpispeed.base.units import parse_count
from mpispeed.ckpt.foreign import folders
from mpispeed.ckpt.foreign.faults import ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.found import WEIGHT16, ReadOptions
from mpispeed.ckpt.foreign.opening import open_foreign
from mpispeed.ckpt.foreign.values import Values
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.index import TensorEntry
from mpispeed.ckpt.read.reader import Checkpoint, open_checkpoint
from mpispeed.ckpt.tools import exporting
from mpispeed.ckpt.tools.weight_files import Weight


class LazyTensor:
    """A tensor of a checkpoint that is read on request.

    Attributes:
        shape: its shape.
        dtype: always torch.float32.
    """

    def __init__(self, shape: tuple[int, ...], values: Values) -> None:
        self.shape, self.dtype = torch.Size(shape), torch.float32
        self._values = values

    def contiguous(self) -> torch.Tensor:
        """Read the tensor into new memory, in fp32."""
        return self._values.whole(self.shape, torch.float32)


class _Stored(Values):
    """Elements of a tensor in one of our checkpoints."""

    def __init__(self, source: Checkpoint, tensor: TensorEntry) -> None:
        super().__init__(tensor.numel, schema.torch_dtype(tensor.dtype))
        self._source, self._tensor = source, tensor

    def read(self, first: int, last: int) -> torch.Tensor:
        """As `Values.read`."""
        out = torch.empty(last - first, dtype=self.dtype)
        self._source.read(self._tensor.name, self._tensor.slot, first, out)
        return out


class _Weights:
    """Weights and buffers of a checkpoint: name -> lazy tensor, and alias -> name."""

    def __init__(self) -> None:
        self.tensors: dict[str, LazyTensor] = {}
        self.aliases: dict[str, str] = {}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """A state dict of full fp32 tensors on the CPU, for `model.load_state_dict`.

    Reads checkpoints of this library and of DeepSpeed. Tied parameters are the same object under each of their names.
    Buffers are fp32 too.

    Args:
        checkpoint_dir: the folder that has the tag's folder.
        tag: name of the checkpoint; None for the one that `latest` names.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: return objects that read their tensor when `.contiguous()` is called.

    Raises:
        ValueError: no tag was given and there is no `latest`; or files are missing or do not fit together.
        FileNotFoundError: the folder does not exist, or has no files of a checkpoint.
        CheckpointError: it cannot be read; base class of the above too.
    """
    weights = _open(checkpoint_dir, tag, exclude_frozen_parameters)
    state: dict[str, Any] = {
        name: tensor if lazy_mode else tensor.contiguous() for name, tensor in weights.tensors.items()
    }
    return state | {alias: state[name] for alias, name in weights.aliases.items() if name in state}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move `model` to the CPU and load the fp32 weights of a checkpoint into it, not strictly.

    Args:
        model: a plain module, not an engine.
        checkpoint_dir: the folder that has the tag's folder.
        tag: name of the checkpoint; None for the one that `latest` names.

    Returns:
        The model.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: as `get_fp32_state_dict_from_zero_checkpoint`.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint as files that torch or safetensors read.

    Args:
        checkpoint_dir: the folder that has the tag's folder.
        output_file: a path ending in .bin, .pt, .pth or .safetensors is one file; any other is a folder, which gets
            shards and an index where one shard is not enough. Files of earlier calls are replaced.
        tag: name of the checkpoint; None for the one that `latest` names.
        exclude_frozen_parameters: leave out what was not trained.
        max_shard_size: elements of a file in a folder, as bytes or text such as "5GB"; None for one file.
        safe_serialization: write safetensors into a folder, not files of torch.

    Raises:
        ValueError, FileNotFoundError, CheckpointError: as `get_fp32_state_dict_from_zero_checkpoint`, or nothing could
            be written.
    """
    path = Path(output_file)
    to = "safetensors" if safe_serialization else "torch"
    if exporting.is_one_file(path) and not safe_serialization:
        to = exporting.format_of(path)
    try:
        limit = None if max_shard_size is None else parse_count(max_shard_size)
    except ValueError as failure:
        msg = f"max_shard_size is {max_shard_size!r}: {failure}"
        raise ForeignMismatch(msg) from failure
    weights = _open(checkpoint_dir, tag, exclude_frozen_parameters)
    aliases: dict[str, list[str]] = {}
    for alias, name in sorted(weights.aliases.items()):
        aliases.setdefault(name, []).append(alias)
    listed = [
        Weight(
            name,
            tuple(aliases.get(name, ())),
            TensorEntry(name, "", tuple(tensor.shape), "float32", -1, -1),
            "float32",
        )
        for name, tensor in weights.tensors.items()
    ]

    def elements(weight: Weight) -> Iterator[memoryview]:
        values = weights.tensors[weight.name]._values
        for part in values.parts(0, values.numel):
            yield schema.as_bytes(part.float().contiguous())

    exporting.write_files(path, listed, elements, to=to, shard_bytes=limit, overwrite=True)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of `item` with every tensor cloned, so that views do not bring their whole storage into a file.

    Args:
        item: a tensor, or nested lists, tuples and dicts that hold tensors; anything else is returned as it is.
        device: where the clones are.

    Returns:
        The same structure; a tensor that occurs several times is one clone.
    """
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        if id(item) not in made:
            source = item.detach()
            made[id(item)] = source.to(device) if source.device != device else source.clone()
        return made[id(item)]
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(_cloned(part, device, made) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(_cloned(part, device, made) for part in item)
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(part, device, made)) for key, part in item.items())  # type: ignore[call-arg]
    return item


def _open(checkpoint_dir: str | os.PathLike[str], tag: str | None, excludes_frozen: bool) -> _Weights:
    path = Path(checkpoint_dir).absolute()
    if not path.is_dir():
        msg = f"the folder {path} does not exist"
        raise ForeignMissing(msg)
    name = None if tag is None else str(tag)
    if name is None and _is_ours(path):
        return _of_ours(open_checkpoint(path), excludes_frozen)
    folder = folders.resolve(path, name)
    if _is_ours(folder):
        return _of_ours(open_checkpoint(folder.parent, folder.name), excludes_frozen)
    return _of_foreign(folder, excludes_frozen)


def _is_ours(folder: Path) -> bool:
    return any((folder / name).exists() for name in (schema.MANIFEST_FILE, schema.MODEL_FILE))


def _of_ours(source: Checkpoint, excludes_frozen: bool) -> _Weights:
    weights = _Weights()
    for name in source.names():
        if excludes_frozen and source.info(name).kind == "frozen":
            continue
        have = [slot for slot in (schema.MASTER_SLOT, WEIGHT16) if slot in source.slots(name)]
        if not have:
            msg = f"{source.path} has no weight of {name!r}"
            raise CheckpointError(msg)
        stored = source.stored(name, have[0])
        weights.tensors[name] = LazyTensor(stored.shape, _Stored(source, stored))
    for name in source.buffers():
        stored = source.stored(name, schema.BUFFER_SLOT)
        weights.tensors[name] = LazyTensor(stored.shape, _Stored(source, stored))
    weights.aliases = {alias: name for alias, name in source.aliases().items() if name in weights.tensors}
    weakref.finalize(source, _close_handles, source._handles)
    return weights


def _close_handles(handles: dict[str, int]) -> None:
    while handles:
        os.close(handles.popitem()[1])


def _of_foreign(folder: Path, excludes_frozen: bool) -> _Weights:
    found = open_foreign(folder.parent, folder.name, ReadOptions(weights_only=True))
    if not any("master" in param.slots for param in found.params.values()):
        msg = f"{folder} has no fp32 weights: no file with optimizer state is there"
        raise ForeignMissing(msg)
    weights = _Weights()
    for name, param in found.params.items():
        if not (excludes_frozen and param.is_frozen):
            weights.tensors[name] = LazyTensor(param.shape, param.weight)
    for name, (shape, values) in found.buffers.items():
        weights.tensors[name] = LazyTensor(shape, values)
    weights.aliases = {alias: name for alias, name in found.aliases.items() if name in weights.tensors}
    return weights
