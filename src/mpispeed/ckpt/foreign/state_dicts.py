"""Reader of plain weights: safetensors and torch state dicts, in one file or in shards with an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpispeed.base.plain import read_plain
from mpispeed.ckpt.foreign import safetensors_files, torch_files
from mpispeed.ckpt.foreign.faults import ForeignCorrupt, ForeignIncomplete, ForeignMismatch, ForeignMissing
from mpispeed.ckpt.foreign.found import Found, ReadOptions, take_state_dict
from mpispeed.ckpt.foreign.matching import number, take_optimizer
from mpispeed.ckpt.foreign.safetensors_files import strict_json

SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth", ".bin", ".ckpt")}
_FOLDER_FILES = {"safetensors": "*.safetensors", "torch": "pytorch_model*.bin"}
#: some hundred bytes per tensor
_INDEX_BYTES = 100_000_000
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
    named = set(_read_index(indexes[0]).values())
    if any(Path(name).name != name for name in named):
        msg = f"{indexes[0]} names files outside of its folder"
        raise ForeignMismatch(msg)
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        msg = f"{indexes[0]} names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not in {folder}"
        raise ForeignIncomplete(msg)
    return [folder / name for name in sorted(named)]


def _read_index(path: Path) -> dict[str, str]:
    """Tensor -> file, as an index says.

    Raises:
        ForeignCorrupt: it is none.
    """
    try:
        places = strict_json(read_plain(path, _INDEX_BYTES, follows_links=True)).get("weight_map")
    except (ValueError, OSError) as failure:
        msg = f"{path} is no index of weight files: {failure}"
        raise ForeignCorrupt(msg) from failure
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        msg = f"{path} is no index of weight files: it does not map tensors to files under weight_map"
        raise ForeignCorrupt(msg)
    return places


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
    found_in: dict[str, str] = {}
    aliases: dict[str, str] = {}
    optimizer: Mapping[str, Any] | None = None
    for file in files:
        if form == "safetensors":
            tensors, texts = safetensors_files.read(file)
            aliases.update(texts)
        else:
            tensors, rest = _split(torch_files.read(file), file)
            optimizer = _take_rest(found, rest) if len(files) == 1 else None
        found_in |= dict.fromkeys(tensors, file.name)
        twice = sorted(tensors.keys() & state.keys())
        if twice:
            msg = f"{file} has {twice[0]!r}, and so has another file of {path}"
            raise ForeignMismatch(msg)
        state.update(tensors)
    if path.is_dir():
        _check_index(path, form, dict.fromkeys(aliases, "") | found_in)
    take_state_dict(found, state, options, frozenset())
    named = {alias: name for alias, name in aliases.items() if name in found.params and alias not in state}
    found.aliases.update(named)
    if optimizer is not None and not options.weights_only:
        take_optimizer(found, optimizer)
        found.rule = found.rule or "Adam"
    return found


def _check_index(folder: Path, form: str, found_in: Mapping[str, str]) -> None:
    """Check that every tensor of the index is in the file that it names; of aliases, only that they exist."""
    for index in folder.glob(f"{_FOLDER_FILES[form]}.index.json"):
        places = _read_index(index)
        lacking = sorted(places.keys() - found_in.keys())
        if lacking:
            msg = f"{index} lists {lacking[0]!r} and {len(lacking) - 1} more tensors that no file of {folder} has"
            raise ForeignIncomplete(msg)
        for name, file in places.items():
            if found_in[name] not in ("", file):
                msg = f"{index} says that {name!r} is in {file}, it is in {found_in[name]}"
                raise ForeignMismatch(msg)


def _split(content: Any, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a file, and its other content."""
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
    """Add the content beside the weights; return the state of the optimizer."""
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
