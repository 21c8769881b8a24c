"""Layout of a DeepSpeed checkpoint folder: tags, and the files of a tag by rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mpispeed.ckpt.foreign.faults import ForeignIncomplete, ForeignMismatch, ForeignMissing, NoForeignTag

K = TypeVar("K")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")  # without tensor parallelism no second number
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OLD_LAYOUT = -1
"""In place of the number of a layer of experts: a file of experts of all layers, before they were numbered."""


@dataclass(slots=True)
class RankFiles:
    """The files of one tag.

    Attributes:
        folder: folder of the tag.
        models: model-parallel rank -> data rank -> file with weights; only rank 0 unless weights are sharded.
        optimizers: model-parallel rank -> data rank -> file with optimizer state.
        layers: (layer, tensor-parallel rank) -> file.
        experts: model-parallel rank -> (layer of experts, expert) -> file.
        expert_optimizers: model-parallel rank -> expert-parallel rank -> file with optimizer state that is not cut.
    """

    folder: Path
    models: dict[int, dict[int, Path]] = field(default_factory=dict)
    optimizers: dict[int, dict[int, Path]] = field(default_factory=dict)
    layers: dict[tuple[int, int], Path] = field(default_factory=dict)
    experts: dict[int, dict[tuple[int, int], Path]] = field(default_factory=dict)
    expert_optimizers: dict[int, dict[int, Path]] = field(default_factory=dict)


def resolve(source: Path, tag: str | None, is_universal: bool = False) -> Path:
    """The folder of a tag: the given one, the one `latest` names, or `source` itself if it is one.

    Raises:
        ForeignMissing: there is no such folder.
        NoForeignTag: no tag was given, and there is neither `latest` nor a file of a checkpoint.
    """
    if not source.is_dir():
        msg = f"the folder {source} does not exist"
        raise ForeignMissing(msg)
    if tag is None:
        if is_tag_folder(source):
            return source
        tag = _latest(source, (LATEST_UNIVERSAL, LATEST) if is_universal else (LATEST, LATEST_UNIVERSAL))
    path = source / tag
    if Path(tag).is_absolute() or ".." in Path(tag).parts or not path.is_dir():
        have = sorted(entry.name for entry in source.iterdir() if entry.is_dir())[:20]
        msg = f"{source} has no folder {tag!r}; it has {', '.join(have) or 'none'}"
        raise ForeignMissing(msg)
    return path


def _latest(source: Path, names: tuple[str, ...]) -> str:
    for name in names:
        path = source / name
        if path.is_file():
            with path.open(errors="replace") as file:
                tag = file.read(4096).strip()
            if tag:
                return tag.splitlines()[0].strip()
    msg = f"{source} has no file {LATEST!r} that names a tag; say which tag to take"
    raise NoForeignTag(msg)


def is_tag_folder(folder: Path) -> bool:
    """True if the folder has files of a checkpoint."""
    return is_universal(folder) or any(
        pattern.fullmatch(path.name) for path in folder.iterdir() for pattern in (_MODEL, _OPTIMIZER, _LAYER)
    )


def is_universal(folder: Path) -> bool:
    """True for a folder with one sub-folder per parameter."""
    return (folder / "zero").is_dir()


def list_files(folder: Path) -> RankFiles:
    """The files of a tag by rank; ranks are sorted as numbers.

    Raises:
        ForeignMissing: there are none.
        ForeignMismatch: there are two for a rank or an expert.
        ForeignIncomplete: numbers are missing.
    """
    found = RankFiles(folder)
    for path in sorted(folder.iterdir()):
        if match := _EXPERT.fullmatch(path.name):
            layer = OLD_LAYOUT if match[1] is None else int(match[1])
            _enter(found.experts, int(match[3]), (layer, int(match[2])), path)
        elif match := _EXPERT_OPTIMIZER.fullmatch(path.name):
            _enter(found.expert_optimizers, int(match[2]), int(match[1]), path)
        elif match := _MODEL.fullmatch(path.name):
            _enter(found.models, int(match[2]), int(match[1] or 0), path)
        elif match := _OPTIMIZER.fullmatch(path.name):
            _enter(found.optimizers, int(match[2]), int(match[1]), path)
        elif match := _LAYER.fullmatch(path.name):
            found.layers[int(match[1]), int(match[2] or 0)] = path
    _check_ranks(found)
    found.models = {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(found.models.items())}
    found.optimizers = {mp: dict(sorted(ranks.items())) for mp, ranks in sorted(found.optimizers.items())}
    return found


def _check_ranks(found: RankFiles) -> None:
    folder = found.folder
    if not found.models:
        msg = f"{folder} has no *mp_rank_*_model_states.pt; it is no DeepSpeed checkpoint, or its save was cut short"
        raise ForeignMissing(msg)
    for table in (found.models, found.optimizers, found.expert_optimizers):
        if table:
            _check_numbers(folder, list(table), "model-parallel rank")
        for ranks in table.values():
            kind = "expert" if table is found.expert_optimizers else "data"
            _check_numbers(folder, list(ranks), f"{kind}-parallel rank")
    if not found.experts.keys() | found.expert_optimizers.keys() <= found.models.keys():
        have = f"{sorted(found.models)} with weights and {sorted(found.experts)} with experts"
        msg = f"{folder} has model-parallel ranks {have}; files are missing"
        raise ForeignIncomplete(msg)
    if found.optimizers and found.optimizers.keys() != found.models.keys():
        have = f"{sorted(found.models)} with weights and {sorted(found.optimizers)} with optimizer state"
        msg = f"{folder} has model-parallel ranks {have}; files are missing"
        raise ForeignIncomplete(msg)


def _enter(table: dict[int, dict[K, Path]], mp: int, key: K, path: Path) -> None:
    ranks = table.setdefault(mp, {})
    if key in ranks:
        what = "expert" if isinstance(key, tuple) else "rank"
        msg = f"{ranks[key]} and {path.name} are of the same {what}; the folder holds two saves, remove one"
        raise ForeignMismatch(msg)
    ranks[key] = path


def _check_numbers(folder: Path, numbers: list[int], what: str) -> None:
    missing = next((place for place, number in enumerate(sorted(numbers)) if place != number), None)
    if missing is not None:
        msg = f"{folder} has no file of {what} {missing}, but one of {max(numbers)}; files are missing"
        raise ForeignIncomplete(msg)
