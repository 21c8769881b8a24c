"""Requests of saves, and comparisons between ranks before anything is written: descriptions, ranges, replicas."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.format import experts, logical, payload, schema, tag_files, tags, tree
from mpispeed.ckpt.format.errors import PLAIN, SaveFailed, UnsupportedValue
from mpispeed.ckpt.format.logical import LogicalTensor, ParamInfo
from mpispeed.native.checksum import crc32c

if TYPE_CHECKING:
    from mpispeed.ckpt.format.saving_comm import SavingComm
    from mpispeed.mesh.comm import Comm


WINDOW_BYTES = 256 << 20
"""Memory of a rank for sending elements to the ranks that write."""

_CHOICES = {
    "verify": ("none", "sample", "full"),
    "writing": ("auto", "direct", "aggregated"),
    "compare_replicas": ("fail", "warn", "off"),
}


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        overwrite: replace a tag that exists; the old one stays until the new one is complete.
        save_latest: make `latest` name the new tag.
        verify: read back "sample" (1 % of the blocks), "full" or "none" before the tag is published.
        check_free_space: refuse early when the file system has less room than the checkpoint needs.
        writing: "direct": every rank writes its pieces; "aggregated": one rank per file writes, the others send it
            theirs; "auto": direct, unless ranks on several nodes share a file system that does not allow it.
        files: how many files hold elements; 0 for one, or one per node where writing is aggregated.
        window_bytes: memory of a rank for aggregated writing.
        compare_replicas: action if replicas differ: "fail", "warn" or "off" (not compared).
        keep_last: number of newest tags kept after a save; 0 keeps all.
        keep_every: tags whose step is a multiple stay in any case; 0 for none.
        node_local: the folder is on a disk of each node, which gets a whole checkpoint of its own; ranks of a node that
            pass different folders get one each.
        scripts: name -> text of files that are put beside `latest`, unless a file of that name is there.
    """

    overwrite: bool = False
    save_latest: bool = True
    verify: str = "sample"
    check_free_space: bool = True
    writing: str = "auto"
    files: int = 0
    window_bytes: int = WINDOW_BYTES
    compare_replicas: str = "fail"
    keep_last: int = 0
    keep_every: int = 0
    node_local: bool = False
    scripts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, words in _CHOICES.items():
            value = getattr(self, name)
            if value not in words:
                msg = f"SaveOptions.{name} is {value!r}; it may be {', '.join(words)}"
                raise CheckpointError(msg)
        for name, least in (("files", 0), ("window_bytes", schema.BLOCK_BYTES), ("keep_last", 0), ("keep_every", 0)):
            value = getattr(self, name)
            if value < least:
                msg = f"SaveOptions.{name} is {value}; it has to be at least {least}"
                raise CheckpointError(msg)


@dataclass(frozen=True, slots=True)
class Request:
    """One checkpoint to write; the same on every rank but for the pieces, the generators and, perhaps, the state.

    Attributes:
        folder: where checkpoints live; with node-local storage that of this rank.
        tag: its name.
        state_bytes: about the size of the state.
        global_step: from the state.
    """

    folder: Path
    tag: str
    params: Sequence[ParamInfo]
    tensors: Sequence[LogicalTensor]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    config_json: str
    rng: Mapping[str, bytes]
    layout: Mapping[str, Any]
    options: SaveOptions
    state_bytes: int
    global_step: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """Facts about all ranks, known to each before it writes.

    Attributes:
        ranges: elements that each rank writes, as in `logical.local_ranges`.
        leaders: the first rank of each node, or of each folder where a node has several.
        neighbours: the ranks that have their folder on the node of rank 0 and share it.
        has_replicas: some rank passed a piece that is only to be compared.
    """

    ranges: Sequence[np.ndarray]
    leaders: tuple[int, ...]
    neighbours: tuple[int, ...]
    has_replicas: bool


def prepare(
    comm: Comm,
    folder: str | Path,
    tag: str,
    *,
    params: Sequence[ParamInfo],
    tensors: Sequence[LogicalTensor],
    aliases: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
    config_json: str = "{}",
    rng: Mapping[str, Any] | None = None,
    layout: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> Request:
    """Make a request, with the checks that are local to a rank. Arguments and errors as `save.save`.

    Collective over: comm.
    """
    with comm.together(SaveFailed, doing="preparing the checkpoint", plain=PLAIN):
        _check_state(state or {})
        _check_aliases(params, aliases or {})
        json.dumps(layout or {})
        logical.check_names(params, tensors)
        logical.check_pieces(tensors)
        generators = {kind: tag_files.rng_bytes(value) for kind, value in (rng or {}).items()}
    with comm.together(UnsupportedValue, doing="checking the state to save", plain=PLAIN):
        state_bytes = tree.check(dict(state or {}), "state")
    engine, of_experts = (state or {}).get("engine", {}), experts.summary(params)
    where, name, options = comm.share((Path(folder).absolute(), str(tag), options or SaveOptions()))
    return Request(
        folder=Path(folder).absolute() if options.node_local else where,
        tag=name,
        params=tuple(params),
        tensors=tuple(tensors),
        aliases=dict(aliases or {}),
        state=state or {},
        config_json=str(config_json),
        rng=generators,
        layout=dict(layout or {}) | ({"experts": of_experts} if of_experts else {}),
        options=options,
        state_bytes=state_bytes,
        global_step=int(engine.get("global_steps", 0)) if isinstance(engine, Mapping) else 0,
    )


def compare(comm: SavingComm, request: Request) -> Ranks:
    """Check that all ranks describe the same checkpoint, and their pieces cover it exactly once.

    Collective over: comm.

    Raises:
        SaveFailed: on every rank.
    """
    mine: list[tuple[object, ...]] = [param.identity() for param in request.params]
    mine += [tensor.identity() for tensor in request.tensors]
    mine += [("alias", *pair) for pair in sorted(request.aliases.items())]
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).digest()
    has_replicas = any(piece.is_replica for tensor in request.tensors for piece in tensor.pieces)
    own = logical.local_ranges(request.tensors)
    everyone = comm.gather_objects((digest, (tags.own_node(), str(request.folder)), own, has_replicas))
    if len({digest for digest, *_ in everyone}) > 1:
        difference = logical.first_difference(mine, comm.share(mine))
        comm.agree(not difference, f"ranks describe different checkpoints: {difference}", SaveFailed)
    ranges = [held for _, _, held, _ in everyone]
    with comm.together(SaveFailed, doing="checking the pieces", plain=PLAIN):
        logical.check_coverage(request.tensors, ranges)
    leader_of = tags.leaders_of([home for _, home, _, _ in everyone])
    neighbours = tuple(rank for rank, leader in enumerate(leader_of) if leader == 0)
    return Ranks(ranges, tuple(sorted(set(leader_of))), neighbours, any(flag for *_, flag in everyone))


def _check_state(state: Mapping[str, Any]) -> None:
    if schema.RNG in state:
        msg = f"the state has a part named {schema.RNG!r}, which belongs to the generators; rename it"
        raise CheckpointError(msg)


def _check_aliases(params: Sequence[ParamInfo], aliases: Mapping[str, str]) -> None:
    names = {param.name for param in params}
    for alias, canonical in aliases.items():
        schema.escape(alias)  # refuses what is no text
        if canonical not in names or alias in names:
            msg = f"alias {alias!r} of {canonical!r}: the canonical name must be a parameter and the alias must not"
            raise CheckpointError(msg)


log = logging.getLogger(__name__)

_SHOWN = 5


def check_replicas(comm: SavingComm, request: Request, ranks: Ranks) -> None:
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
    with comm.together(SaveFailed, doing="comparing copies", plain=PLAIN):
        rows = _checksums([(i, t) for i, t in copied if i in wanted])
    rows_by_rank = comm.gather_objects(rows)
    problem = ""
    with comm.together(SaveFailed, doing="comparing copies", plain=PLAIN):
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
