"""`ckpt import`: conversion of checkpoints of other programs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.errors import CheckpointError
from mpispeed.ckpt.foreign.found import Found, FoundParam, ReadOptions
from mpispeed.ckpt.foreign.opening import open_foreign
from mpispeed.ckpt.foreign.pickles import Inert
from mpispeed.ckpt.foreign.values import Values
from mpispeed.ckpt.format import schema, tree
from mpispeed.ckpt.format.errors import UnsupportedValue
from mpispeed.ckpt.format.logical import Deferred, LogicalTensor, ParamInfo, Piece
from mpispeed.ckpt.write.request import SaveOptions
from mpispeed.ckpt.write.save import SaveReport, save
from mpispeed.mesh.backends.solo import solo_comm


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Result of an import.

    Attributes:
        saved: the checkpoint that was written.
        form: format of the source.
        params, buffers, aliases: their numbers.
        slots: names of the stored slots of parameters.
        left_out: descriptions of content of the source that is not in the checkpoint.
    """

    saved: SaveReport
    form: str
    params: int
    buffers: int
    aliases: int
    slots: tuple[str, ...]
    left_out: tuple[str, ...]


def import_checkpoint(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    source_tag: str | None = None,
    options: ReadOptions | None = None,
    prefix_map: Sequence[tuple[str, str]] = (),
    overwrite: bool = False,
) -> ImportReport:
    """Write a checkpoint of another program as one of ours, a part at a time. Needs no MPI.

    Args:
        source: a file of weights, a folder with shards, or a folder of DeepSpeed checkpoints.
        folder: where our checkpoint goes.
        tag: its name; None for the name of the source's tag, or "imported".
        source_tag: which checkpoint of a DeepSpeed folder; None for the latest.
        options: how to read the source.
        prefix_map: (regular expression, replacement), applied to all names in order.
        overwrite: replace a tag that exists.

    Local.

    Raises:
        CheckpointError: the source cannot be read or converted, or nothing could be written.
    """
    found = open_foreign(source, source_tag, options)
    _rename(found, prefix_map)
    if not found.params and not found.buffers:
        msg = f"{found.path} holds no tensors"
        raise CheckpointError(msg)
    if tag is None:
        tag = found.path.name if found.form in ("zero", "universal") else "imported"
    state = _state(found)
    saved = save(
        solo_comm(),
        Path(folder),
        tag,
        params=[_info(param) for param in found.params.values()],
        tensors=list(_tensors(found)),
        aliases=found.aliases,
        state=state,
        config_json=found.config_json,
        layout={**found.layout, "imported_from": found.form},
        options=SaveOptions(overwrite=overwrite),
    )
    slots = sorted({slot for param in found.params.values() for slot in param.slots}, key=schema.slot_order)
    counts = (len(found.params), len(found.buffers), len(found.aliases))
    return ImportReport(saved, found.form, *counts, tuple(slots), tuple(found.left_out))


def _info(param: FoundParam) -> ParamInfo:
    return ParamInfo(
        param.name,
        param.shape,
        param.train_dtype,
        "frozen" if param.is_frozen else "trainable",
        param.group,
        0 if param.is_frozen else param.step,
        tp_kind=param.tp_kind,
        tp_dim=param.tp_dim,
        expert=param.expert,
    )


def _tensors(found: Found) -> Iterator[LogicalTensor]:
    for param in found.params.values():
        for slot in sorted(param.slots, key=schema.slot_order):
            yield _tensor(param.name, slot, param.shape, param.slots[slot])
    for name, (shape, values) in found.buffers.items():
        yield _tensor(name, schema.BUFFER_SLOT, shape, values)


def _tensor(name: str, slot: str, shape: tuple[int, ...], values: Values) -> LogicalTensor:
    later = Deferred(values.numel, values.dtype, values.parts)
    return LogicalTensor(name, slot, shape, values.dtype, [Piece(0, later)])


def _rename(found: Found, rows: Sequence[tuple[str, str]]) -> None:
    for old, new in rows:
        try:
            pattern = re.compile(old)
            names = [*found.params, *found.buffers, *found.aliases]
            renamed = {name: pattern.sub(new, name) for name in names}
        except (re.error, IndexError) as failure:
            msg = f"{old!r} -> {new!r} is no valid replacement of names: {failure}"
            raise CheckpointError(msg) from failure
        if all(name == after for name, after in renamed.items()):
            msg = f"no name fits {old!r}; names are, for example, {', '.join(names[:5])}"
            raise CheckpointError(msg)
        if len(set(renamed.values())) < len(renamed):
            after = sorted(renamed.values())
            twice = next(name for name, following in pairwise(after) if name == following)
            msg = f"with {old!r} -> {new!r} two tensors would be called {twice!r}"
            raise CheckpointError(msg)
        found.params = {renamed[k]: replace(param, name=renamed[k]) for k, param in found.params.items()}
        found.buffers = {renamed[name]: buffer for name, buffer in found.buffers.items()}
        found.aliases = {renamed[alias]: renamed[name] for alias, name in found.aliases.items()}


def _state(found: Found) -> dict[str, Any]:
    """The state tree, in the form in which an engine saves it."""
    counters = found.counters
    steps = int(counters.get("global_steps", 0))
    static = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": steps}
    state: dict[str, Any] = {
        "engine": {
            "global_steps": steps,
            "global_samples": int(counters.get("global_samples", 0)),
            "skipped_steps": int(counters.get("skipped_steps", 0)),
            "micro_steps": 0,
            "loss_scaler": counters.get("loss_scaler", static),
        },
        "client": _kept(found, found.client, ""),
    }
    if found.groups:
        state["optimizer"] = _optimizer(found)
    if found.lr_scheduler is not None:
        state["lr_scheduler"] = _kept(found, found.lr_scheduler, "lr_scheduler.")
    return state


def _optimizer(found: Found) -> dict[str, Any]:
    members: list[list[str]] = [[] for _ in found.groups]
    slots: set[str] = set()
    for param in found.params.values():
        if param.group >= 0 and not param.is_frozen:
            members[param.group].append(param.name)
            slots |= param.slots.keys() - {schema.MASTER_SLOT, "weight16"}
    return {
        "name": found.rule,
        "slots": sorted(slots),
        # Counts of updates are with the parameters, as for rules of the JSON.
        "scalars": {"of_params": {"sets": [], "names": [], "starts": [], "indices": []}, "of_rule": {}},
        "param_groups": [{**group, "params": own} for group, own in zip(found.groups, members, strict=True)],
    }


def _kept(found: Found, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The entries that the format has a place for; the others are named in `left_out`."""
    kept = {}
    for key, value in values.items():
        plain = _plain(value)
        try:
            tree.check(plain, f"{where}{key}")
        except UnsupportedValue as failure:
            found.left_out.append(str(failure))
            continue
        kept[str(key)] = plain
    return kept


def _plain(value: Any) -> Any:
    """Records of other libraries as dicts, and tensors as copies that need no file."""
    if isinstance(value, Inert):
        return {key: _plain(item) for key, item in value.fields.items()} or list(map(_plain, value.args))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
