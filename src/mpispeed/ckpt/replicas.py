"""Copies that ranks hold of the same elements are compared before one of them is saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt import payload, schema
from mpispeed.ckpt.logical import LogicalTensor
from mpispeed.ckpt.request import Request, together
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

_SHOWN = 5


def check_replicas(comm: Comm, request: Request) -> None:
    """Compare what ranks hold of parameters of tp_kind "replicated", bit for bit, by checksums of blocks.

    Ranks that hold copies have to cut them alike.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank, if copies differ and `compare_replicas` is "fail".
    """
    mode = request.options.compare_replicas
    names = {param.name for param in request.params if param.tp_kind == "replicated"}
    wanted = [(i, tensor) for i, tensor in enumerate(request.tensors) if tensor.name in names]
    if mode == "off" or not wanted or comm.size == 1:
        return
    rows = np.empty((0, 4), np.int64)
    with together(comm, "comparing copies"):
        rows = _checksums(wanted)
    everyone = comm.gather_objects(rows)
    with together(comm, "comparing copies"):
        problem = _first_differences(request.tensors, everyone)
        if problem and mode == "fail":
            raise CheckpointError(problem)
    if problem and comm.rank == 0:
        log.warning("%s", problem)


def _checksums(wanted: Sequence[tuple[int, LogicalTensor]]) -> np.ndarray:
    rows = []
    for index, tensor in wanted:
        for piece in tensor.pieces:
            step = max(1, schema.BLOCK_BYTES // tensor.itemsize)
            for start in range(piece.start, piece.stop, step):
                stop, crc = min(start + step, piece.stop), 0
                for data in payload.checked_parts(tensor, piece, start, stop):
                    crc = crc32c(data, crc)
                rows.append((index, start, stop, crc))
    return np.array(rows, np.int64).reshape(-1, 4)


def _first_differences(tensors: Sequence[LogicalTensor], rows_by_rank: Sequence[np.ndarray]) -> str:
    """What differs, with the tensors, the ranges and the ranks; empty if nothing does."""
    seen: dict[tuple[int, int, int], tuple[int, int]] = {}
    found: list[str] = []
    for rank, rows in enumerate(rows_by_rank):
        for index, start, stop, crc in rows.tolist():
            first_rank, first_crc = seen.setdefault((index, start, stop), (rank, crc))
            if crc != first_crc:
                found.append(f"{tensors[index].label}[{start}:{stop}] of rank {first_rank} and rank {rank}")
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"copies that have to be equal differ: {', '.join(found[:_SHOWN])}{more}; the parameter has run apart between "
        'tensor-parallel ranks. compare_replicas="warn" saves that of the first rank'
    )
