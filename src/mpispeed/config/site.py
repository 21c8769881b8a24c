"""Site defaults under the users' settings, and settings that the site has locked."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mpispeed.base.plain import printable
from mpispeed.base.site_file import SiteFile
from mpispeed.config import added, legacy
from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from mpispeed.config.problems import Problem, find_too_deep, refuse, show
from mpispeed.config.section import has_secrets, knows, section_at, text_keys

_OF_RUNS = (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)
"""Settings of which two give the third: a default among them would contradict what users give."""

_KINDS = ("optimizer", "scheduler")
_ABSENT = object()


def translate_site(site: SiteFile) -> legacy.Translation:
    """The site's defaults in the models' spelling.

    Raises:
        ConfigError: they have mistakes; names the site file.
    """
    where = f"the site file {printable(site.path)}, [config]"
    problems = find_too_deep(site.config)
    if problems:
        raise refuse(where, problems)
    done = legacy.translate(site.config, text_keys(added.root()), partial(knows, added.root()))
    batch = [Problem(name, "batch sizes belong to runs", "take it out") for name in _OF_RUNS if name in done.data]
    unknown = [
        Problem(path, "there is no such setting to lock", "see mpispeed config schema")
        for path in site.locked
        if not _is_setting(_canonical(path))
    ]
    if done.problems or batch or unknown:
        raise refuse(where, [*done.problems, *batch, *unknown])
    return done


def lay_under(done: legacy.Translation, site: SiteFile) -> None:
    """Put the site's defaults under translated settings, and add a problem for each change of what is locked.

    "auto" counts as absent. Of an optimizer or a schedule of another type the site's parameters are left out, but for
    locked ones.

    Raises:
        ConfigError: as `translate_site`.
    """
    below = translate_site(site)
    done.warnings += [f"{site.path}: {warning}" for warning in below.warnings]
    _lay(done, below.data, site)


def lay_section_under(
    done: legacy.Translation, site: SiteFile, section: str, *, but: Collection[str] = (), has_defaults: bool = True
) -> None:
    """As `lay_under`, with what the site says of one section: for settings that have no other.

    Args:
        done: the section in the models' spelling, at its path.
        site: the site's file, which is checked as a whole.
        section: the path of the section, a key of the root.
        but: keys of the section that are nothing to these settings.
        has_defaults: False: changes of what is locked are found, and nothing is laid under.

    Raises:
        ConfigError: as `translate_site`.
    """
    said = translate_site(site).data.get(section)
    below = {section: {key: value for key, value in said.items() if key not in but}} if said else {}
    left_out = {f"{section}.{key}" for key in but}
    named = (path for path in map(_canonical, site.locked) if ".".join(path.split(".")[:2]) not in left_out)
    part = replace(site, locked=tuple(path for path in named if path.partition(".")[0] == section))
    own = done.data.get(section)
    kept = {key: own.pop(key) for key in but if key in own} if isinstance(own, dict) else {}
    _lay(done, below, part, has_defaults=has_defaults)
    if kept:
        done.data[section].update(kept)


def _lay(done: legacy.Translation, below: Mapping[str, Any], site: SiteFile, *, has_defaults: bool = True) -> None:
    done.problems += _find_changed(done, below, site)
    if not has_defaults:
        return
    _merge(done, done.data, below, "", site)
    for path, value in _locked_values(below, site):
        if not _entries(done.data, path):
            legacy.put(done.data, path, copy.deepcopy(value))
            _note(done, path, value, site)


def _locked_values(below: Mapping[str, Any], site: SiteFile) -> list[tuple[str, Any]]:
    return [entry for locked in map(_canonical, site.locked) for entry in _entries(below, locked)]


def name_source(problems: Iterable[Problem], done: legacy.Translation) -> list[Problem]:
    """The problems, with the source of those settings that are not in the users' file."""
    return [_with_source(problem, done.of_site) for problem in problems]


def _with_source(problem: Problem, origins: Mapping[str, str]) -> Problem:
    words = {word.strip(";,.:()\"'") for word in problem.what.split()} | {problem.path}
    named = sorted(path for path in origins if path in words or path.startswith(f"{problem.path}."))
    if not problem.path or not named:
        return problem
    note = f"{', '.join(named)}: from the {origins[named[0]]}"
    return problem._replace(cure=f"{problem.cure} ({note})" if problem.cure else note)


def _merge(
    done: legacy.Translation, above: dict[str, Any], below: Mapping[str, Any], prefix: str, site: SiteFile
) -> None:
    for name, value in below.items():
        path, own = f"{prefix}{name}", above.get(name, _ABSENT)
        if own is _ABSENT:
            above[name] = copy.deepcopy(value)
            _note(done, path, value, site)
        elif isinstance(own, dict) and isinstance(value, Mapping) and not (prefix == "" and _differ(name, own, value)):
            _merge(done, own, value, f"{path}.", site)


def _note(done: legacy.Translation, path: str, value: Any, site: SiteFile) -> None:
    """Remember the site as the origin of a value, or of all values of a section."""
    if isinstance(value, Mapping) and value:
        for name, entry in value.items():
            _note(done, f"{path}.{name}", entry, site)
        return
    done.autos.discard(path)
    done.of_site[path] = f"site file {site.path}"


def _differ(name: str, above: Mapping[str, Any], below: Mapping[str, Any]) -> bool:
    kinds = {str(section.get("type")).lower() for section in (above, below) if "type" in section}
    return name in _KINDS and len(kinds) > 1


def _find_changed(done: legacy.Translation, below: Mapping[str, Any], site: SiteFile) -> list[Problem]:
    """A problem for each entry of the users' settings that gives a locked one another value than the site's."""
    problems = []
    for locked in map(_canonical, site.locked):
        for path, value in _entries(done.data, locked):
            wanted = _at(below, path)
            if value == wanted:
                continue
            has_value = wanted is not _ABSENT and not _is_hidden(path)
            at = f" at {show(wanted)}" if has_value else ""
            what = f"is locked{at} by {printable(site.path)} of {site.owner}, key {locked}"
            problems.append(Problem(done.as_spelled(path), what, "leave it out"))
    return problems


def _entries(data: Mapping[str, Any], locked: str) -> list[tuple[str, Any]]:
    """(path, value) of entries at or below a locked path, or of what stands in the place of a section around it."""
    node: Any = data
    keys = locked.split(".")
    for count, key in enumerate(keys):
        if not isinstance(node, Mapping):
            return [(".".join(keys[:count]), node)]
        if key not in node:
            return []
        node = node[key]
    return list(_leaves(node, locked))


def _leaves(node: Any, path: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        yield path, node
        return
    for name, entry in node.items():
        yield from _leaves(entry, f"{path}.{name}")


def _at(data: Mapping[str, Any], path: str) -> Any:
    node: Any = data
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return _ABSENT
        node = node[key]
    return node


def _canonical(path: str) -> str:
    """A path in the models' spelling."""
    return next((alias.new for alias in legacy.ALIASES if alias.old == path), path)


def _is_setting(path: str) -> bool:
    *parents, last = path.split(".")
    return knows(added.root(), parents, last)


def _is_hidden(path: str) -> bool:
    keys = path.split(".")
    sections = (section_at(added.root(), keys[:count]) for count in range(1, len(keys) + 1))
    return any(section is not None and has_secrets(section) for section in sections)
