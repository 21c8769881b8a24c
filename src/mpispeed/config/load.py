"""From a path, a dict or a base64 text to a validated configuration; the only module here that reads files."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from mpispeed.base.errors import ConfigError
from mpispeed.config import legacy
from mpispeed.config.checks import find_conflicts, find_warnings
from mpispeed.config.problems import Problem, find_too_deep, from_validation, path_of, refuse
from mpispeed.config.root import TEXT_KEYS, Config
from mpispeed.config.section import section_at, walk
from mpispeed.config.text import decode

INLINE = "configuration"
Location = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its history.

    Attributes:
        config: the validated settings.
        raw: the settings as they were read, before translation.
        origins: path of each value -> "given", "default", "alias of ...", 'default ("auto")', "given as ...".
        warnings: sentences about deprecated or ignored keys.
        where: what the settings were read from, for messages.
    """

    config: Config
    raw: Mapping[str, Any]
    origins: Mapping[str, str]
    warnings: list[str] = field(default_factory=list)
    where: str = INLINE


def load(source: str | Path | Mapping[str, Any]) -> LoadedConfig:
    """Read, translate and validate.

    Args:
        source: path of a JSON file, a dict, or the URL-safe base64 of a JSON text.

    Raises:
        ConfigError: lists every mistake of the source, one per line, each with its path.
    """
    content, where = read_source(source)
    return parse(content, where) if isinstance(content, str) else validate(content, where)


def read_source(source: str | Path | Mapping[str, Any]) -> tuple[str | Mapping[str, Any], str]:
    """The JSON text, or the dict itself, and a name for it in messages.

    Raises:
        ConfigError: there is no such file, or it cannot be read as text.
    """
    if isinstance(source, Mapping):
        return source, INLINE
    _require_name(source)
    if _exists(Path(source)):
        return _read_file(Path(source)), str(source)
    text = _from_base64(str(source))
    if text is not None:
        return text, "configuration in base64"
    shown = str(source) if len(str(source)) <= 200 else f"{str(source)[:197]}..."
    hint = "; to give the settings themselves, pass a dict" if shown.lstrip().startswith("{") else ""
    msg = f"{shown}: there is no such configuration file, and it is no base64 of a JSON text{hint}"
    raise ConfigError(msg)


def parse(text: str, where: str) -> LoadedConfig:
    """Validate a JSON text that was already read, for example on another rank.

    Raises:
        ConfigError: as `load`.
    """
    raw, problems = decode(text, where)
    return validate(raw, where, problems)


def validate(raw: Mapping[str, Any], where: str = INLINE, known: Sequence[Problem] = ()) -> LoadedConfig:
    """Translate and validate settings; `raw` is not changed.

    Args:
        raw: the settings as they were read.
        where: what they were read from, for messages.
        known: mistakes found while reading, to be reported with all others.

    Raises:
        ConfigError: as `load`.
    """
    too_deep = find_too_deep(raw)
    if too_deep:
        raise refuse(where, [*known, *too_deep])
    done = legacy.translate(raw, TEXT_KEYS)
    config, problems = _build(done)
    problems = [*known, *done.problems, *problems]
    if config is not None:
        told = {problem.path for problem in problems}
        spelled = [Problem(done.as_spelled(p.path), p.what, p.cure) for p in find_conflicts(config)]
        problems += [p for p in spelled if not any(path.partition("[")[0] == p.path for path in told)]
    if problems or config is None:
        raise refuse(where, problems)
    values = flatten(config.resolved_dict())
    origins = MappingProxyType({path: done.origin(path) for path in (*values, *sorted(done.autos))})
    return LoadedConfig(config, raw, origins, [*done.warnings, *find_warnings(config, done.as_spelled)], where)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Path -> value for all values that are no sections; an empty section counts as a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def _build(done: legacy.Translation) -> tuple[Config | None, list[Problem]]:
    """The models' verdict. With mistakes, the rest is built too so that conflicts in it show in the same message."""
    data = done.data
    problems: list[Problem] = []
    told = {problem.path for problem in done.problems}
    for _ in range(3):
        try:
            return Config.model_validate(data), problems
        except ValidationError as error:
            found = from_validation(error, _names_at, _homes())
        spelled = [Problem(done.as_spelled(p.path), p.what, p.cure) for _, p in found]
        problems += [p for p in spelled if not any(path == p.path or path.startswith(f"{p.path}.") for path in told)]
        told |= {problem.path for problem in spelled}
        for location, _ in found:
            data = _without(data, location)
    return None, problems


def _names_at(location: Location) -> list[str]:
    """Known keys, old spellings included, of the section at a location."""
    keys = [key for key in location if isinstance(key, str)]
    section = section_at(Config, keys)
    names = list(section.model_fields) if section else []
    here = path_of(keys)
    return names + [a.old.rpartition(".")[2] for a in legacy.ALIASES if a.old.rpartition(".")[0] == here]


@cache
def _homes() -> dict[str, list[str]]:
    """Key -> all paths where it is legal."""
    homes: dict[str, list[str]] = {}
    for entry in walk(Config):
        homes.setdefault(entry.name, []).append(entry.path)
    for alias in legacy.ALIASES:
        homes.setdefault(alias.old.rpartition(".")[2], []).append(alias.old)
    return homes


def _without(node: Any, location: Location) -> Any:
    """A copy without the entry at a location (or without the section that lacks a required key)."""
    if not location:
        return node
    key, rest = location[0], location[1:]
    if isinstance(node, list):
        return node if not isinstance(key, int) or key >= len(node) else []
    if not isinstance(node, dict) or key not in node:
        return node
    if not rest:
        return {k: v for k, v in node.items() if k != key}
    if len(rest) == 1 and isinstance(node[key], dict) and rest[0] not in node[key]:
        return {k: v for k, v in node.items() if k != key}
    return {**node, key: _without(node[key], rest)}


def _require_name(source: object) -> None:
    if not isinstance(source, (str, Path)):
        msg = f"configuration: expected a path, a dict or a base64 text, found {type(source).__name__}"
        raise ConfigError(msg)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a long base64 text is no legal file name
        return False


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        msg = f"{path}: the configuration file cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    except UnicodeDecodeError as error:
        msg = f"{path}: the configuration file is no UTF-8 text (byte {error.start})"
        raise ConfigError(msg) from None


def _from_base64(text: str) -> str | None:
    """The JSON object in a URL-safe base64 text, or None if it is something else."""
    try:
        decoded = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (ValueError, binascii.Error):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
