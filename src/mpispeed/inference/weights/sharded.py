"""Sharded copies of weights: one of our checkpoints, in which every slice is a dataset of its own.

A later start with as many ranks reads of sliced parameters only its own bytes; with another number of ranks the
slices are put together as their slicing says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpispeed.ckpt.foreign.found import MASTER, WEIGHT16
from mpispeed.ckpt.format import schema
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.save import SaveOptions, SaveReport, save
from mpispeed.inference.weights.sources import SHARD_SLOT, SLICES
from mpispeed.inference.weights.targets import Target, find_targets
from mpispeed.mesh.comm import Comm
from mpispeed.nn.tensor.tensor_cut import COPIED

TAG = "weights"
"""Tag of a copy, which `latest` names."""


def save_sharded(model: nn.Module, folder: str | os.PathLike[str], tensor: Comm) -> SaveReport:
    """Write the weights of a sliced model as they are on the ranks; `load_weights` reads them on any number of ranks.

    An older copy in the folder stays until the new one is complete.

    Args:
        model: sliced over `tensor`, with values.
        folder: made if missing; the same on all ranks.
        tensor: the slicing group; where there are several, one of them saves.

    Collective over: `tensor`.

    Raises:
        SaveFailed: the copy could not be written, or ranks have different models; on all ranks.
    """
    targets = find_targets(model, tensor.rank, tensor.size, None)
    params, tensors, aliases = [], list[LogicalTensor](), dict[str, str]()
    for target in targets.rows:
        aliases |= dict.fromkeys(target.names[1:] if target.is_param else [], target.name)
        if target.is_param:
            params.append(_info(target))
            tensors += _of_param(target, tensor)
        else:
            values = _flat(target.held)
            pieces = [Piece(0, values)] if tensor.rank == 0 else []
            tensors.append(LogicalTensor(target.name, schema.BUFFER_SLOT, target.shape, values.dtype, pieces))
    return save(
        tensor,
        Path(os.fspath(folder)),
        TAG,
        params=params,
        tensors=tensors,
        aliases=aliases,
        state={SLICES: {row.name: _slices(row, tensor.size) for row in targets.rows if row.cut is not None}},
        config_json=_config(model),
        layout={"tensor": tensor.size, "model": type(model).__name__},
        options=SaveOptions(overwrite=True),
    )


def _of_param(target: Target, tensor: Comm) -> list[LogicalTensor]:
    values, cut = _flat(target.held), target.cut
    if cut is None:
        slot = MASTER if values.dtype == torch.float32 else WEIGHT16
        pieces = [Piece(0, values)] if tensor.rank == 0 else []
        return [LogicalTensor(target.name, slot, target.shape, values.dtype, pieces)]
    return [
        LogicalTensor(
            target.name,
            SHARD_SLOT.format(rank=rank),
            cut.local_shape(rank, tensor.size),
            values.dtype,
            [Piece(0, values)] if rank == tensor.rank else [],
        )
        for rank in range(tensor.size)
    ]


def _info(target: Target) -> ParamInfo:
    dtype = target.held.dtype
    if target.cut is None:
        return ParamInfo(target.name, target.shape, dtype, kind="frozen")
    cut = target.cut
    if cut.kind == COPIED:  # has no name in checkpoints
        return ParamInfo(target.name, target.shape, dtype, kind="frozen")
    return ParamInfo(
        target.name,
        target.shape,
        dtype,
        kind="frozen",
        tp_kind=cut.kind,
        tp_dim=cut.dim,
        tp_sub_sizes=cut.sub_sizes,
        tp_grains=cut.grains,
        vocab_size=target.shape[0] if cut.kind == "vocab" else -1,
    )


def _slices(target: Target, size: int) -> dict[str, Any]:
    """Dim and ranges of all slices of a parameter."""
    cut = target.cut
    if cut is None:
        return {}
    return {"dim": cut.dim, "ranges": [[list(row) for row in cut.ranges(rank, size)] for rank in range(size)]}


def _flat(held: torch.Tensor) -> torch.Tensor:
    return held.detach().cpu().contiguous().view(-1)


def _config(model: Any) -> str:
    """The config of the model as JSON, of transformers' models."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    return json.dumps(to_dict() if callable(to_dict) else {}, default=str)
