"""Loading of weights into a model that is sliced already: each file is read once per node, straight into the slices."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import ReadOptions
from mpispeed.ckpt.foreign.in_file import Files
from mpispeed.inference.buffers import remade_bytes, remake_buffers
from mpispeed.inference.weights import budget as budgets
from mpispeed.inference.weights import schedule
from mpispeed.inference.weights.names import Matched, first_names, match, missing_message
from mpispeed.inference.weights.plan import make_plan
from mpispeed.inference.weights.policy import is_json, read_policy
from mpispeed.inference.weights.rounds import Rounds, check_sums
from mpispeed.inference.weights.sliced import of_policy
from mpispeed.inference.weights.sources import Source, Sources, find_sources
from mpispeed.inference.weights.targets import Target, Targets, find_targets
from mpispeed.mesh.comm import Comm

log = logging.getLogger(__name__)

#: of one rank: more of them only wait for the same memory
_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a load.

    Attributes:
        path: file or folder.
        tensors: of the model that have values from it.
        unexpected: names in the files that the model has no place for.

    Units:
        size_bytes: of the tensors in the files; bytes_read: by this rank; seconds: wall time.
    """

    path: Path
    tensors: int
    size_bytes: int
    bytes_read: int
    seconds: float
    unexpected: tuple[str, ...]


def load_weights(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    node: Comm,
    tensor: Comm,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    base_dir: str = "",
    mapped: bool | None = None,
    budget: int | None = None,
    finish: Callable[[str], object] | None = None,
    everyone: Comm | None = None,
    options: ReadOptions | None = None,
) -> Loaded:
    """Fill the parameters and buffers of a model from files.

    Ranks of a node read different pieces of the files, at most 4 MiB at a time, and hand the others what they need
    through shared memory, so that no rank has more than its slice and some pieces.

    Args:
        model: sliced over `tensor` or not (`nn.tensor.cuts`); tensors on the meta device get memory as they are read.
        source: a file or folder of safetensors or torch files, our checkpoints, DeepSpeed's, a copy by `save_sharded`,
            or DeepSpeed's load policy, as a dict or a JSON file.
        node: the ranks of this node that load the model.
        tensor: the slicing group.
        tag: of a folder of checkpoints; None for the one that `latest` names.
        dtype: of parameters and buffers with a fraction; None for those that they have.
        base_dir: root of relative names in a load policy.
        mapped: do not copy slices that lie in a file as they are, but map it, copy-on-write, as safetensors does: ranks
            of a node then have the same memory. The file must not be changed while the model is used. None: if it is on
            this node. Only for tensors on the meta device.
        budget: bytes that a rank may allocate; None for what the node has left.
        finish: called with the path of each module when its own tensors are there, in the same order on all ranks.
        everyone: all ranks that load at the same time, which raise the same error; None for those of the node.
        options: for reading other programs' files.

    Collective over: `node`, and `everyone`.

    Raises:
        CheckpointError: files are missing, damaged or of another model, or there is too little memory; on all ranks.
    """
    started = time.monotonic()
    find = partial(_find, source, tag, dtype, base_dir, options or ReadOptions(weights_only=True))
    if everyone is None or everyone.size == node.size:
        return _load(model, node, tensor, find, dtype, mapped, budget, finish, started)
    made: list[Loaded] = []
    with everyone.together(CheckpointError):
        made.append(_load(model, node, tensor, find, dtype, mapped, budget, finish, started))
    return made[0]


def _find(
    source: str | os.PathLike[str] | Mapping[str, Any],
    tag: str | None,
    dtype: torch.dtype | None,
    base_dir: str,
    options: ReadOptions,
) -> Sources:
    """Open a source of any kind."""
    if isinstance(source, Mapping):
        return of_policy(read_policy(source, base_dir), options, "the load policy")
    path = Path(os.fspath(source))
    if is_json(path):
        return of_policy(read_policy(path, base_dir), options, str(path))
    return find_sources(path.parent if path.name.endswith(".index.json") else path, tag, dtype, options)


def _load(
    model: nn.Module,
    node: Comm,
    tensor: Comm,
    find: Callable[[], Sources],
    dtype: torch.dtype | None,
    mapped: bool | None,
    budget: int | None,
    finish: Callable[[str], object] | None,
    started: float,
) -> Loaded:
    sources, matched, targets = _agreed(model, node, tensor, find, dtype)
    pairs, rounds = make_plan(node, tensor, matched, sources, mapped=mapped)
    needed = sum(pair.target.new_bytes for pair in pairs if pair.mapped is None) + 4 * schedule.PIECE_BYTES
    budgets.check(node, needed + remade_bytes(model), budget, f"{sources.path} and the buffers of the model")
    if matched.unexpected and node.rank == 0:
        log.warning("%s has tensors that the model has no place for: %s", sources.path, first_names(matched.unexpected))
    finisher = _Finisher(targets, [pair.target for pair in pairs], finish)
    with Files(sources.states) as files:
        mover = Rounds(node, tensor.rank, files, pairs, max(1, min(torch.get_num_threads(), _MOST_THREADS)))
        with torch.no_grad():
            sums = mover.carry_out(rounds, finisher.done)
        check_sums(node, sums, sources.sums)
        count = files.bytes_read
    with node.together(CheckpointError), torch.no_grad():
        remake_buffers(model)
    size_bytes = sum(_bytes(source) for _, source in matched.pairs)
    seconds = time.monotonic() - started
    return Loaded(sources.path, len(pairs), size_bytes, count, seconds, tuple(matched.unexpected))


def _bytes(source: Source) -> int:
    return sum(shard.values.numel for shard in source.shards) * source.dtype.itemsize


def _agreed(
    model: nn.Module, node: Comm, tensor: Comm, find: Callable[[], Sources], dtype: torch.dtype | None
) -> tuple[Sources, Matched, Targets]:
    """What files have, which one rank of the node has looked at, and what the model takes of it. Collective: node."""
    found: Sources | None = None
    with node.together(CheckpointError):
        if node.rank == 0:
            found = find()
    sources: Sources = node.share(found)
    made: list[tuple[Matched, Targets]] = []
    with node.together(CheckpointError):
        targets = find_targets(model, tensor.rank, tensor.size, dtype)
        matched = match(targets, sources, model)
        if matched.missing:
            raise CheckpointError(missing_message(matched, sources, targets))
        made.append((matched, targets))
    matched, targets = made[0]
    return sources, matched, targets


class _Finisher:
    """Tells which modules have all of their own tensors."""

    def __init__(self, targets: Targets, expected: Sequence[Target], finish: Callable[[str], object] | None) -> None:
        waited = {id(target) for target in expected}
        self._finish = finish
        self._left: dict[str, set[int]] = {}
        self._modules: dict[int, list[str]] = {}
        for path, rows in targets.leaves.items():
            keys = {id(targets.rows[row]) for row in rows} & waited
            self._left[path] = keys
            for key in keys:
                self._modules.setdefault(key, []).append(path)

    def done(self, target: Target) -> None:
        """Note that a tensor is there."""
        if self._finish is not None:
            target.values = None  # the module alone has it now, and may give it up
        for path in self._modules.get(id(target), ()):
            self._left[path].discard(id(target))
            if not self._left[path] and self._finish is not None:
                self._finish(path)
