"""Reader of DeepSpeed's universal checkpoints: a folder per parameter, a file per slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import experts, torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch
from mpispeed.ckpt.foreign.folders import list_files
from mpispeed.ckpt.foreign.found import MASTER, WEIGHT16, Found, FoundParam, ReadOptions
from mpispeed.ckpt.foreign.matching import number, plain_group
from mpispeed.ckpt.foreign.run_state import take_loss_scale, take_run
from mpispeed.ckpt.foreign.values import Plain

_WEIGHT, _STEP, _OPTIMIZER, _SUFFIX = "fp32", "step", "optimizer_state.pt", ".pt"


def read(folder: Path, options: ReadOptions) -> Found:
    """Read the folder of a universal checkpoint.

    Counters, buffers, tied and frozen parameters come from the files with weights that lie beside `zero`.

    Raises:
        ForeignIncomplete: a parameter has no weight or no shape; the conversion was cut short.
        ForeignCorrupt: a file is damaged.
        RefusedPickle: a file holds objects that could run code.
    """
    found, zero = Found(folder, "universal"), folder / "zero"
    models = _models(folder)
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}
    for model in models:
        rows = model.get("param_shapes") or []
        for group, row in enumerate([rows] if isinstance(rows, Mapping) else rows):
            shapes.update({str(name): (tuple(shape), group) for name, shape in row.items()})
    if models:
        take_run(found, models[0])
    names = sorted(str(path.parent.relative_to(zero)) for path in zero.glob(f"**/{_WEIGHT}{_SUFFIX}"))
    missing = sorted(shapes.keys() - set(names))
    if missing or not names:
        what = f"{missing[0]!r} and {len(missing) - 1} more" if missing else "any parameter"
        msg = f"{zero} has no {_WEIGHT}{_SUFFIX} of {what}; the conversion to this folder was cut short"
        raise ForeignIncomplete(msg)
    _take_optimizer(found, zero)
    is_sliced = len(models) > 1
    types = models[0].get("module") or {} if models else {}
    # in the order of the model, as far as it is known
    for name in [*shapes, *(name for name in names if name not in shapes)]:
        shape, group = shapes.get(name, (None, 0))
        param = _param(zero / name, name, None if is_sliced else shape, options)
        weight = types.get(name)
        if isinstance(weight, torch.Tensor):
            param.train_dtype = weight.dtype
        param.group = group if group < len(found.groups) else 0
        found.add(param)
    for model in models[:1]:
        _take_rest(found, model, is_sliced)
    experts.mark_universal(found, models[0].get("num_experts") if models else None)
    return found


def _models(folder: Path) -> list[dict[str, Any]]:
    """The first file with weights of each model-parallel rank; there may be none."""
    if not any(folder.glob("*mp_rank_*_model_states.pt")):
        return []
    contents = [torch_files.read(ranks[min(ranks)]) for ranks in list_files(folder).models.values()]
    return [content for content in contents if isinstance(content, dict)]


def _take_optimizer(found: Found, zero: Path) -> None:
    path = zero / _OPTIMIZER
    if not path.is_file():
        found.groups = [{}]
        return
    state = torch_files.read(path)
    if not isinstance(state, dict):
        msg = f"{path} holds a {type(state).__name__} where a dict of states is expected"
        raise ForeignCorrupt(msg)
    groups = state.get("param_groups") or (state.get("base_optimizer_state") or {}).get("param_groups") or [{}]
    found.groups = [plain_group(group) for group in groups]
    take_loss_scale(found, state)


def _tensor(path: Path) -> tuple[torch.Tensor | None, bool]:
    """The tensor of a file, alone or as "param" beside notes of how it was merged; whether it is of all experts."""
    content, is_of_experts = torch_files.read(path), False
    if isinstance(content, Mapping):
        is_of_experts = content.get("is_expert_param") is True
        content = content.get("param")
    if isinstance(content, (int, float)):
        return torch.tensor(content), is_of_experts
    return content if isinstance(content, torch.Tensor) else None, is_of_experts


def _param(folder: Path, name: str, shape: tuple[int, ...] | None, options: ReadOptions) -> FoundParam:
    weight, is_of_experts = _tensor(folder / f"{_WEIGHT}{_SUFFIX}")
    if weight is None:
        msg = f"{folder / _WEIGHT}{_SUFFIX} holds no tensor"
        raise ForeignCorrupt(msg)
    # The model's file has the shape of the experts of one rank.
    shape = tuple(weight.shape) if shape is None or is_of_experts else shape
    param = FoundParam(name, shape, weight.dtype, {MASTER: Plain(weight)})
    if weight.numel() != param.numel:
        msg = f"{folder}: the weight has shape {tuple(weight.shape)}, the model's file says {shape}"
        raise ForeignMismatch(msg)
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        slot = path.name.removesuffix(_SUFFIX)
        value = None if slot == _WEIGHT or options.weights_only else _tensor(path)[0]
        if value is None:
            continue
        if slot == _STEP:
            param.step = int(number(value) or 0)
        elif value.numel() == param.numel:
            param.slots[slot] = Plain(value)
        elif value.numel() > 1:
            msg = f"{path} has shape {tuple(value.shape)}, the parameter {shape}"
            raise ForeignMismatch(msg)
    return param


def _take_rest(found: Found, model: Mapping[str, Any], is_sliced: bool) -> None:
    """Buffers, tied and frozen parameters."""
    module = model.get("module") or {}
    for name in model.get("buffer_names") or ():
        if isinstance(module.get(name), torch.Tensor):
            found.add_buffer(name, module[name])
    for alias, name in (model.get("shared_params") or {}).items():
        if name in found.params:
            found.aliases[alias] = name
    for name, weight in module.items():
        if name in found.params or name in found.aliases or name in found.buffers:
            continue
        if not isinstance(weight, torch.Tensor) or is_sliced or not weight.numel():
            found.left_out.append(f"{name}: no whole tensor in the files")
        else:
            found.add(FoundParam(name, tuple(weight.shape), weight.dtype, {WEIGHT16: Plain(weight)}, is_frozen=True))
