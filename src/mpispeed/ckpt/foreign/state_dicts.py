"""Files and folders of plain weights: safetensors and torch state dicts, in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.ckpt.foreign import safetensors_files, torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.found import Found, ReadOptions, take_state_dict
from mpispeed.ckpt.foreign.matching import number, take_optimizer

SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth", ".bin", ".ckpt")}
_FOLDER_FILES = {"safetensors": "*.safetensors", "torch": "pytorch_model*.bin"}
#: where a file keeps the weights beside other things
_WEIGHTS = ("model", "state_dict", "module", "model_state_dict")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states")


def shards(folder: Path, form: str) -> list[Path]:
    """The weight files of a folder: those that the index names, else all of them.

    Raises:
        ForeignIncomplete: the index names a file that is not there.
        ForeignCorrupt: the index cannot be read.
    """
    indexes = sorted(folder.glob(f"{_FOLDER_FILES[form]}.index.json"))
    if len(indexes) > 1:
        msg = f"{folder} has several indexes: {', '.join(path.name for path in indexes)}; import from a folder with one"
        raise ForeignMismatch(msg)
    if not indexes:
        return sorted(folder.glob(_FOLDER_FILES[form]))
    try:
        named = {str(name) for name in json.loads(indexes[0].read_text())["weight_map"].values()}
    except (ValueError, KeyError, AttributeError, TypeError) as failure:
        msg = f"{indexes[0]} is no index of weight files: {type(failure).__name__}: {failure}"
        raise ForeignCorrupt(msg) from failure
    if any(Path(name).name != name for name in named):
        msg = f"{indexes[0]} names files outside of its folder"
        raise ForeignMismatch(msg)
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        msg = f"{indexes[0]} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not in {folder}"
        raise ForeignIncomplete(msg)
    return [folder / name for name in sorted(named)]


def read(path: Path, form: str, options: ReadOptions) -> Found:
    """Read a file, or a folder of shards.

    Args:
        path: the file or the folder.
        form: "safetensors" or "torch".
        options: how.

    Raises:
        ForeignMissing: nothing of this form is there.
        ForeignIncomplete: a shard is missing, or lacks tensors that the index promises.
        ForeignCorrupt: a file is damaged.
        RefusedPickle: a file holds objects that could run code.
    """
    files = shards(path, form) if path.is_dir() else [path]
    if not files:
        msg = f"{path} has no {form} files ({_FOLDER_FILES[form]})"
        raise ForeignMissing(msg)
    found = Found(path, form)
    state: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    optimizer: Mapping[str, Any] | None = None
    for file in files:
        if form == "safetensors":
            tensors, texts = safetensors_files.read(file)
            aliases.update(texts)
        else:
            tensors, rest = _split(torch_files.read(file), file)
            optimizer = _take_rest(found, rest) if len(files) == 1 else None
        twice = sorted(tensors.keys() & state.keys())
        if twice:
            msg = f"{file} has {twice[0]!r}, and so has another file of {path}"
            raise ForeignMismatch(msg)
        state.update(tensors)
    if path.is_dir():
        _check_index(path, form, state.keys() | aliases.keys())
    take_state_dict(found, state, options, frozenset())
    named = {alias: name for alias, name in aliases.items() if name in found.params and alias not in state}
    found.aliases.update(named)
    if optimizer is not None and not options.weights_only:
        take_optimizer(found, optimizer)
        found.rule = found.rule or "Adam"
    return found


def _check_index(folder: Path, form: str, names: Any) -> None:
    for index in folder.glob(f"{_FOLDER_FILES[form]}.index.json"):
        lacking = sorted(set(json.loads(index.read_text())["weight_map"]) - names)
        if lacking:
            msg = f"{index} lists {lacking[0]!r} and {len(lacking) - 1} more tensors that no file of {folder} has"
            raise ForeignIncomplete(msg)


def _split(content: Any, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a file, and what else is in it."""
    if isinstance(content, Mapping):
        for key in _WEIGHTS:
            inner = content.get(key)
            if isinstance(inner, Mapping) and any(isinstance(value, torch.Tensor) for value in inner.values()):
                return dict(inner), {name: value for name, value in content.items() if name != key}
        if any(isinstance(value, torch.Tensor) for value in content.values()):
            return {str(name): value for name, value in content.items()}, {}
    msg = (
        f"{file} holds a {type(content).__name__} without weights; expected a state dict, or a dict that has one under "
        f"{', '.join(_WEIGHTS)}"
    )
    raise ForeignMismatch(msg)


def _take_rest(found: Found, rest: dict[str, Any]) -> Mapping[str, Any] | None:
    """Keep what stands beside the weights; gives the state of the optimizer."""
    optimizer = None
    for key, value in rest.items():
        if key in _OPTIMIZERS and isinstance(value, Mapping) and "param_groups" in value and "state" in value:
            optimizer = value
        elif key in ("global_step", "global_steps") and number(value) is not None:
            found.counters["global_steps"] = int(number(value) or 0)
        elif key in ("lr_scheduler", "scheduler") and isinstance(value, dict):
            found.lr_scheduler = value
        else:
            found.client[str(key)] = value
    return optimizer
