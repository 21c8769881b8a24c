"""DeepSpeed's load policy: a JSON object that names files of weights, and how ranks shared them.

Source: DeepSpeed 0.16.5, documentation of `init_inference` (`checkpoint`, `base_dir`), `SDLoaderFactory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpispeed.base.errors import CheckpointError
from mpispeed.base.plain import read_plain
from mpispeed.base.registry import did_you_mean
from mpispeed.ckpt.foreign.safetensors_files import strict_json

TYPES = ("ds_model", "bloom", "megatron")
_KEYS = ("type", "version", "checkpoints", "parallelization", "mp_size", "tp_size", "base_dir", "dtype")
_VERSIONS = (0, 1.0, 2.0)
_SUFFIXES = (".bin", ".pt", ".pth", ".safetensors")
_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Policy:
    """Files of weights.

    Attributes:
        kind: one of `TYPES`.
        whole: files of whole tensors, each of some of them.
        groups: files of slices; those of a group are of all ranks, in their order, and have the same names.
        version: of Megatron's files, None for the one that they say; it tells how query, key and value are fused.
    """

    kind: str
    whole: tuple[Path, ...]
    groups: tuple[tuple[Path, ...], ...]
    version: float | None


def is_json(path: Path) -> bool:
    """True for a JSON file that is no index of shards."""
    return path.suffix == ".json" and not path.name.endswith(".index.json")


def read_policy(source: Mapping[str, Any] | Path, base_dir: str = "") -> Policy:
    """Read a policy.

    Args:
        source: the object, or the file that has it.
        base_dir: root of relative names where the policy has none; else the folder of the file.

    Raises:
        CheckpointError: it says what is not known, or contradicts itself.
    """
    where = "the load policy" if isinstance(source, Mapping) else str(source)
    content = dict(source) if isinstance(source, Mapping) else _read(source)
    unknown = next((key for key in content if key not in _KEYS), None)
    if unknown is not None:
        msg = f"{where} has the key {unknown!r}; known are {', '.join(_KEYS)}.{did_you_mean(str(unknown), _KEYS)}"
        raise CheckpointError(msg)
    kind = str(content.get("type", "ds_model"))
    if kind.lower() not in TYPES:
        msg = f"{where} has the type {kind!r}; it may be ds_model, bloom or Megatron"
        raise CheckpointError(msg)
    if str(content.get("dtype", "")).endswith("int8"):
        msg = f"{where} is of weights in int8 with scales, as DeepSpeed's kernels have them; load the weights before "
        msg += "quantization, and let dtype=int8 or quant quantize them"
        raise CheckpointError(msg)
    version = content.get("version")
    if kind.lower() == "megatron" and version is not None and version not in _VERSIONS:
        msg = f"{where} has the version {version!r} of Megatron's checkpoints; known are 0, 1.0 and 2.0"
        raise CheckpointError(msg)
    roots = [str(content.get("base_dir") or base_dir)]
    if not roots[0] and not isinstance(source, Mapping):
        roots = [str(source.parent), ""]
    whole, groups = _files(content, where, roots, kind.lower())
    return Policy(kind.lower(), whole, groups, None if version is None else float(version))


def _read(path: Path) -> dict[str, Any]:
    try:
        return strict_json(read_plain(path, _BYTES, follows_links=True).lstrip())
    except (ValueError, OSError) as failure:
        msg = f"{path} is no load policy: {failure}"
        raise CheckpointError(msg) from failure


def _files(
    content: Mapping[str, Any], where: str, roots: list[str], kind: str
) -> tuple[tuple[Path, ...], tuple[tuple[Path, ...], ...]]:
    named, way = content.get("checkpoints"), content.get("parallelization", "pp")
    if way not in ("pp", "tp"):
        msg = f"{where} has parallelization {way!r}; it may be 'pp' (whole tensors) or 'tp' (slices)"
        raise CheckpointError(msg)
    size = content.get("tp_size", content.get("mp_size"))
    if size is not None and (type(size) is not int or size < 1):
        msg = f"{where} has tp_size {size!r}; it is a number of ranks, at least 1"
        raise CheckpointError(msg)
    if isinstance(named, Mapping):
        odd = next((key for key in named if key not in ("tp", "non_tp")), None)
        if odd is not None:
            msg = f"{where} has checkpoints of {odd!r}; they may be lists 'tp' and 'non_tp'"
            raise CheckpointError(msg)
        whole, sliced = _paths(named.get("non_tp", []), where, roots), _paths(named.get("tp", []), where, roots)
    elif way == "tp" or kind == "megatron":
        whole, sliced = [], _paths(named, where, roots)
    else:
        whole, sliced = _paths(named, where, roots), []
    size = size or len(sliced)
    if not whole and not sliced:
        msg = f"{where} names no files (checkpoints)"
        raise CheckpointError(msg)
    if sliced and len(sliced) % size:
        msg = f"{where} names {len(sliced)} files of slices of {size} ranks, which is no multiple"
        raise CheckpointError(msg)
    return tuple(whole), tuple(tuple(sliced[at : at + size]) for at in range(0, len(sliced), size or 1))


def _paths(named: object, where: str, roots: list[str]) -> list[Path]:
    """The files of a list, or all of a folder."""
    if isinstance(named, str):
        folder = _placed(named, roots)
        if folder.is_dir():
            return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES)
        return [folder]
    if not isinstance(named, (list, tuple)) or not all(isinstance(name, str) for name in named):
        msg = f"{where} has checkpoints {named!r:.80}; they are a list of files, a folder, or lists 'tp' and 'non_tp'"
        raise CheckpointError(msg)
    return [_placed(name, roots) for name in named]


def _placed(name: str, roots: list[str]) -> Path:
    return next((path for root in roots if (path := Path(root) / name).exists()), Path(roots[0]) / name)
