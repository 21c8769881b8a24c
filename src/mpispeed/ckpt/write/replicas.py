"""Comparison of the replicas that ranks hold, before one of them is saved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import payload, schema
from mpispeed.ckpt.format.errors import together
from mpispeed.ckpt.format.logical import LogicalTensor
from mpispeed.ckpt.write.request import Ranks, Request
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

_SHOWN = 5


def check_replicas(comm: Comm, request: Request, ranks: Ranks) -> None:
    """Compare pieces that are replicas with those that are written, bit for bit, by checksums of parts.

    Replicas have to be divided into the same pieces. Those of "averaged" parameters may differ and are not compared.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank, if copies differ and `compare_replicas` is "fail".
    """
    mode = request.options.compare_replicas
    if mode == "off" or not ranks.has_replicas:
        return
    averaged = {param.name for param in request.params if param.tp_kind == "averaged"}
    copied = [(i, t) for i, t in enumerate(request.tensors) if t.name not in averaged]
    everyone = comm.gather_objects({i for i, t in copied for piece in t.pieces if piece.is_replica})
    wanted = set().union(*everyone)
    rows = np.empty((0, 5), np.int64)
    with together(comm, "comparing copies"):
        rows = _checksums([(i, t) for i, t in copied if i in wanted])
    rows_by_rank = comm.gather_objects(rows)
    problem = ""
    with together(comm, "comparing copies"):
        problem = _problem(request.tensors, rows_by_rank)
        if problem and mode == "fail":
            raise CheckpointError(problem)
    if problem and comm.rank == 0:
        log.warning("%s", problem)


def _checksums(wanted: Sequence[tuple[int, LogicalTensor]]) -> np.ndarray:
    """Rows (tensor, first element, one past the last, is a replica, checksum) of this rank's pieces, in parts."""
    rows = []
    for index, tensor in wanted:
        for piece in tensor.pieces:
            turn = piece.pattern.numel if piece.pattern else 1
            step = max(1, schema.BLOCK_BYTES // tensor.itemsize // turn)
            for turns in range(0, piece.count // turn, step):
                first, last, crc = turns * turn, min((turns + step) * turn, piece.count), 0
                for data in payload.checked_parts(tensor, piece, first, last):
                    crc = crc32c(data, crc)
                start = piece.start + turns * (piece.pattern.period if piece.pattern else 1)
                rows.append((index, start, last - first, int(piece.is_replica), crc))
    return np.array(rows, np.int64).reshape(-1, 5)


def _problem(tensors: Sequence[LogicalTensor], rows_by_rank: Sequence[np.ndarray]) -> str:
    """A sentence that names differing tensors, elements and ranks, or ""."""
    written: dict[tuple[int, int, int], tuple[int, int]] = {}
    replicas: list[tuple[int, tuple[int, int, int], int]] = []
    for rank, rows in enumerate(rows_by_rank):
        for index, start, count, is_replica, crc in rows.tolist():
            if is_replica:
                replicas.append((rank, (index, start, count), crc))
            else:
                written[index, start, count] = rank, crc
    found: list[str] = []
    for rank, key, crc in replicas:
        label = f"{tensors[key[0]].label}, {key[2]} elements from {key[1]} on"
        if key not in written:
            found.append(f"{label}: rank {rank} has a copy, but no rank writes just these")
        elif crc != written[key][1]:
            found.append(f"{label}: rank {written[key][0]} and rank {rank} differ")
    if not found:
        return ""
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"copies that have to be equal are not: {'; '.join(found[:_SHOWN])}{more}. They have run apart between ranks, "
        'for example of a tensor-parallel group. compare_replicas="warn" saves what is written and warns'
    )
