"""Reader of DeepSpeed's ZeRO checkpoints: weights, masters and optimizer state in flat shards in files of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import expert_state, experts, pipeline_files, torch_files
from mpispeed.ckpt.foreign.experts import Experts
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.flat_parts import Cut, Share, cut_by_group, cut_by_parameter
from mpispeed.ckpt.foreign.folders import RankFiles, list_files
from mpispeed.ckpt.foreign.found import WEIGHT16, Found, FoundParam, ReadOptions, take_state_dict
from mpispeed.ckpt.foreign.run_state import take_loss_scale, take_run
from mpispeed.ckpt.foreign.undivided import take_undivided
from mpispeed.ckpt.foreign.values import Plain, Values, placed

_KEY = "optimizer_state_dict"


def read(folder: Path, options: ReadOptions) -> Found:
    """Read the folder of a tag.

    Raises:
        ForeignMissing: a file is not there.
        ForeignIncomplete: files of some ranks are missing or of another save.
        ForeignCorrupt: a file is damaged.
        ForeignMismatch: sizes or names do not fit together.
        RefusedPickle: a file holds objects that could run code.
    """
    files = list_files(folder)
    shares = [_read_share(files, mp, options) for mp in files.models]
    if files.layers:
        return pipeline_files.join(files, shares, options)
    if len(shares) == 1:
        return shares[0][0]
    return pipeline_files.join_slices(folder, [found for found, _ in shares], options, len(shares))


def _read_share(files: RankFiles, mp: int, options: ReadOptions) -> tuple[Found, dict[str, Any]]:
    """The part of one model-parallel rank, and the content of its first file with weights."""
    paths = list(files.models[mp].values())
    models = [_mapping(torch_files.read(path), path) for path in paths]
    model, found = models[0], Found(files.folder, "zero")
    if "buffer_names" not in model or model["buffer_names"] is None:
        msg = f"{paths[0]} lists no buffers; it is no file of a DeepSpeed engine with model states"
        raise ForeignMismatch(msg)
    optimizers = [
        _mapping(_mapping(torch_files.read(path), path).get(_KEY), path)
        for path in files.optimizers.get(mp, {}).values()
    ]
    mixture = experts.read(files, mp, model)
    take_run(found, model)
    if optimizers:
        _take_parts(found, (model, optimizers, mixture), options)
        if len(paths) not in (1, len(optimizers)):
            msg = f"{files.folder} has {len(paths)} files with weights and {len(optimizers)} with optimizer state"
            raise ForeignIncomplete(msg)
    elif model.get("param_shapes") and not options.weights_only:
        msg = f"{files.folder} has no *_optim_states.pt; the save was cut short, or only weights were copied"
        raise ForeignMissing(msg)
    _take_frozen(found, models, mixture)
    _take_module(found, model, options, mixture)
    if mixture is not None:
        mixture.take(found, options, map(str, model["buffer_names"]))
    if not optimizers and isinstance(model.get("optimizer"), Mapping) and not options.weights_only:
        if mixture is None:
            take_undivided(found, model["optimizer"])
        else:
            expert_state.take(found, mixture, files.expert_optimizers.get(mp, {}))
    return found, model


def _mapping(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        msg = f"{path} holds a {type(content).__name__} where a dict of states is expected"
        raise ForeignCorrupt(msg)
    return content


def _shape_lists(model: Mapping[str, Any], folder: Path) -> list[dict[str, tuple[int, ...]]]:
    listed = model.get("param_shapes")
    if not listed:
        msg = f"{folder}: the file with weights has no shapes of parameters (param_shapes)"
        raise ForeignMismatch(msg)
    rows = [listed] if isinstance(listed, Mapping) else listed
    return [{str(name): tuple(shape) for name, shape in row.items()} for row in rows]


def _take_parts(
    found: Found, files: tuple[Mapping[str, Any], Sequence[dict[str, Any]], Experts | None], options: ReadOptions
) -> None:
    """Masters and optimizer state from the flat parts of all data ranks."""
    folder, (model, optimizers, mixture) = found.path, files
    _check_count(folder, optimizers)
    shapes = _shape_lists(model, folder)
    has_groups = all("single_partition_of_fp32_groups" in own for own in optimizers)
    if not has_groups and not all("fp32_flat_groups" in own for own in optimizers):
        kind = optimizers[0].get("zero_stage")
        msg = (
            f"{folder}: files with optimizer state of an unknown kind (stage {kind!r}): they have neither "
            f"single_partition_of_fp32_groups nor fp32_flat_groups but {', '.join(map(str, optimizers[0]))}"
        )
        raise ForeignMismatch(msg)
    cuts: Iterator[Cut]
    if not has_groups:
        if mixture is not None:
            msg = f"{folder} has experts cut by ZeRO stage 3, as no DeepSpeed writes them; import with --weights-only"
            raise ForeignMismatch(msg)
        cuts, found.groups = cut_by_parameter(folder, shapes, optimizers)
    else:
        whole: list[list[Share]] = [[(range(len(optimizers)), str)] for _ in shapes]
        shares = whole if mixture is None else mixture.shares(shapes, optimizers)
        cuts, found.groups = cut_by_group(folder, shapes, optimizers, shares)
        cuts = cuts if mixture is None else mixture.joined(cuts)
    types = model.get("module") or {}
    done = int(found.counters["global_steps"]) - int(found.counters["skipped_steps"])
    for name, shape, group, step, slots in cuts:
        weight = types.get(name)
        dtype = weight.dtype if isinstance(weight, torch.Tensor) else slots["master"].dtype
        kept = {slot: values for slot, values in slots.items() if slot == "master" or not options.weights_only}
        found.add(FoundParam(name, shape, dtype, kept, False, group, done if step is None else step))
    found.rule = found.rule or "Adam"
    take_loss_scale(found, optimizers[0])


def _check_count(folder: Path, optimizers: Sequence[dict[str, Any]]) -> None:
    """Check that all ranks of the save have a file.

    Raises:
        ForeignIncomplete: a file is missing.
    """
    for rank, own in enumerate(optimizers):
        count = own.get("partition_count", len(optimizers))
        wanted = max(map(int, count)) if isinstance(count, (list, tuple)) and count else count
        wanted = int(wanted) if isinstance(wanted, (int, float)) else len(optimizers)
        if wanted != len(optimizers):
            msg = (
                f"{folder}: the file with optimizer state of rank {rank} is one of {wanted}, there are "
                f"{len(optimizers)}; the folder was overwritten by another save, or files are missing"
            )
            raise ForeignIncomplete(msg)


def _take_frozen(found: Found, models: Sequence[Mapping[str, Any]], mixture: Experts | None) -> None:
    """Parameters that are not trained, from their copies beside the weights; those of experts are in other files."""
    shapes, fragments = models[0].get("frozen_param_shapes"), models[0].get("frozen_param_fragments")
    if not shapes or not fragments:
        return
    for name, listed in shapes.items():
        if mixture is not None and mixture.has(name):
            continue
        shape = tuple(listed)
        numel = math.prod(shape)
        parts = [model["frozen_param_fragments"][name] for model in models]
        weight: Values = Plain(parts[0])
        if len(parts) > 1 or parts[0].numel() != numel:
            flat = [part.reshape(-1) for part in parts]
            stride = -(-numel // len(parts))
            weight = placed(flat, stride, 0, numel, f"{found.path}: the frozen parameter {name!r}")
        found.add(FoundParam(name, shape, weight.dtype, {WEIGHT16: weight}, is_frozen=True))


def _take_module(found: Found, model: Mapping[str, Any], options: ReadOptions, mixture: Experts | None) -> None:
    """Add buffers, tied parameters, and weights that are nowhere else."""
    module = model.get("module") or {}
    buffers = [name for name in model["buffer_names"] if isinstance(module.get(name), torch.Tensor)]
    for name in buffers:
        found.add_buffer(name, module[name])
    for alias, name in (model.get("shared_params") or {}).items():
        if mixture is not None and (mixture.has(alias) or mixture.has(name)):
            found.left_out.append(f"{alias}: that it is tied to {name}, of one rank's experts")
        elif name in found.params:
            found.aliases[alias] = name
    known = frozenset((*found.params, *found.aliases, *buffers))
    frozen = model.get("frozen_param_shapes")
    excluded = frozenset(frozen or ()) - known
    placeholders = {
        name
        for name, value in module.items()
        if name not in known and isinstance(value, torch.Tensor) and not value.numel()
    }
    if found.params:  # where weights are cut, a name without elements is a tied parameter of which no more is known
        found.left_out += [f"{name}: only a placeholder is in the files" for name in sorted(placeholders - excluded)]
        known |= placeholders
    before = set(found.params)
    take_state_dict(found, module, options, known | excluded)
    if found.groups or before:
        for name in found.params.keys() - before:
            _freeze(found.params[name])


def _freeze(param: FoundParam) -> None:
    """Mark a parameter as frozen: its weight is beside sharded ones, but no rank has optimizer state of it."""
    param.is_frozen = True
    param.slots = {WEIGHT16: param.weight}
