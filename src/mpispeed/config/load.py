"""Reads a path, a dict or a base64 text into a validated configuration.

The text is not kept: it may hold keys of services, which only the validated settings know how to hide.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from mpispeed.base.errors import ConfigError
from mpispeed.base.plain import printable, read_plain
from mpispeed.base.site_file import current
from mpispeed.config import added, legacy
from mpispeed.config.checks import find_conflicts, find_warnings
from mpispeed.config.ineffective import drop_unused
from mpispeed.config.overlay import merged
from mpispeed.config.problems import Location, Problem, find_too_deep, from_validation, path_of, refuse
from mpispeed.config.root import Config
from mpispeed.config.section import Section, has_secrets, knows, section_at, text_keys, walk
from mpispeed.config.site import lay_under, name_source
from mpispeed.config.text import decode

INLINE = "configuration"
LARGEST_BYTES = 4 << 20
"""Longest text of settings; real ones have some thousand bytes."""

_PATH = re.compile(r"[a-z]\w*(?:\.\w+)+")
_BASE64 = re.compile(r"e[wy][\w+/=-]{14,}", re.ASCII)  # of a text that begins with {


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration and its history.

    Attributes:
        config: the validated settings.
        origins: path of each value -> "given", "default", "alias of ...", 'default ("auto")', "given as ...",
            "site file ...".
        warnings: sentences about deprecated or ignored keys.
        where: what the settings were read from, for messages.
    """

    config: Config
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
    raw, problems = decode(content, where) if isinstance(content, str) else (content, [])
    return validate(merged(raw), where, problems)


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
    msg = f"{_shown(str(source))}: there is no such configuration file, and it is no base64 of a JSON text"
    if str(source).lstrip().startswith("{"):
        msg += "; to give the settings themselves, pass a dict"
    raise ConfigError(msg)


def _shown(source: str) -> str:
    """The source if it seems to be a name; for settings themselves, which may hold secrets, only their length."""
    is_content = source.lstrip().startswith("{") or ("." not in source and _BASE64.match(source.lstrip()) is not None)
    return f"a text of {len(source)} characters" if is_content else printable(source, 200)


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
    verdict = judge(raw, known)
    if verdict.problems or verdict.config is None:
        raise refuse(where, verdict.problems)
    return verdict.accept(where)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of validation.

    Attributes:
        config: the settings, without those that are wrong; None where nothing is left to look at.
        problems: all mistakes.
        done: how entries were translated.
    """

    config: Config | None
    problems: list[Problem]
    done: legacy.Translation

    def accept(self, where: str) -> LoadedConfig:
        """The settings and their history; there must be no problems."""
        config, done = self.config, self.done
        if config is None:
            raise refuse(where, self.problems)
        values = flatten(config.resolved_dict())
        origins = MappingProxyType({path: done.origin(path) for path in (*values, *sorted(done.autos))})
        return LoadedConfig(config, origins, [*done.warnings, *find_warnings(config, done.as_spelled)], where)

    def add(self, problems: Iterable[Problem]) -> None:
        """Add mistakes of settings that are legal one by one, except those that only follow from others."""
        told = {problem.path.partition("[")[0] for problem in self.problems}
        for problem in problems:
            spelled = problem._replace(path=self.done.as_spelled(problem.path))
            if told.isdisjoint({spelled.path, *_PATH.findall(spelled.what)}):
                self.problems.append(spelled)


def judge(raw: Mapping[str, Any], known: Sequence[Problem] = ()) -> Verdict:
    """Translate settings, lay the site's defaults under them, validate, collect mistakes; `raw` is not changed.

    Raises:
        ConfigError: the site file itself is wrong.
    """
    too_deep = find_too_deep(raw)
    if too_deep:
        return Verdict(None, [*known, *too_deep], legacy.Translation({}))
    done = legacy.translate(raw, text_keys(added.root()), partial(knows, added.root()))
    if (site := current()).path:
        lay_under(done, site)
    config, problems = _build(done)
    if config is not None:
        config, unused = drop_unused(config, done.as_spelled)
        done.warnings += unused
    verdict = Verdict(config, [*known, *done.problems, *name_source(problems, done)], done)
    if config is not None:
        verdict.add(name_source(find_conflicts(config, done.autos), done))
    return verdict


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
    """Build the models. With mistakes, the rest is built too, so that its conflicts are in the same message."""
    problems: list[Problem] = []
    told = _covered(done.problems)
    names = cache(_names_at)
    for _ in range(3):
        try:
            return added.root().model_validate(done.data), problems
        except ValidationError as error:
            found = from_validation(error, names, _homes(added.root()), _is_hidden)
        spelled = [Problem(done.as_spelled(p.path), p.what, p.cure) for _, p in found]
        problems += [problem for problem in spelled if problem.path not in told]
        told |= _covered(spelled)
        for location, _ in found:
            _take_out(done.data, location)
    return None, problems


def _covered(problems: Iterable[Problem]) -> set[str]:
    """The paths of problems and of all sections around them, for which no more is reported."""
    return {path for problem in problems for path in (problem.path, *legacy.prefixes(problem.path))}


def _names_at(location: Location) -> list[str]:
    """Known keys, old spellings included, of the section at a location."""
    keys = [key for key in location if isinstance(key, str)]
    section = section_at(added.root(), keys)
    names = list(section.model_fields) if section else []
    here = path_of(keys)
    return names + [a.old.rpartition(".")[2] for a in legacy.ALIASES if a.old.rpartition(".")[0] == here]


def _is_hidden(location: Location) -> bool:
    """True if a value stands in a section with secrets, or in the place of one."""
    keys = [key for key in location if isinstance(key, str)]
    sections = (section_at(added.root(), keys[:count]) for count in range(1, len(keys) + 1))
    return any(section is not None and has_secrets(section) for section in sections)


@cache
def _homes(root: type[Section]) -> dict[str, list[str]]:
    """Key -> all paths where it is legal."""
    homes: dict[str, list[str]] = {}
    for entry in walk(root):
        homes.setdefault(entry.name, []).append(entry.path)
    for alias in legacy.ALIASES:
        homes.setdefault(alias.old.rpartition(".")[2], []).append(alias.old)
    return homes


def _take_out(data: dict[str, Any], location: Location) -> None:
    """Remove the entry at a location, the whole list it is in, or the section that lacks a required key."""
    node: Any = data
    above, last = data, ""
    for key in location:
        if not isinstance(node, dict) or key not in node:
            break
        above, last, node = node, str(key), node[key]
    above.pop(last, None)


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
        return read_plain(path, LARGEST_BYTES, follows_links=True).decode("utf-8-sig")
    except OSError as error:
        msg = f"{printable(str(path))}: the configuration file cannot be read: {error.strerror or error}"
        raise ConfigError(msg) from None
    except UnicodeDecodeError as error:
        msg = f"{printable(str(path))}: the configuration file is no UTF-8 text (byte {error.start})"
        raise ConfigError(msg) from None


def _from_base64(text: str) -> str | None:
    """The JSON object in a URL-safe base64 text, or None if it is something else."""
    if len(text) > 2 * LARGEST_BYTES:
        return None
    try:
        decoded = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode("utf-8")
    except (ValueError, binascii.Error):
        return None
    return decoded if decoded.lstrip().startswith("{") else None
