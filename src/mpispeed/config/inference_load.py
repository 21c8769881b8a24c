"""Settings of `init_inference` from a config and keywords: read, translated, merged and validated in one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from mpispeed.base.site_file import current
from mpispeed.config import added, legacy
from mpispeed.config.inference import (
    InferenceConfig,
    forward,
    is_same,
    read_dtype,
    rename,
    spread_moe,
    spread_quant,
)
from mpispeed.config.load import INLINE
from mpispeed.config.problems import Location, Problem, find_too_deep, from_validation, refuse, show
from mpispeed.config.section import Section, inner_section, knows, section_at, text_keys, walk
from mpispeed.config.site import lay_section_under, name_source
from mpispeed.config.text import decode

KEYWORDS = "keywords"
_TRAINING = "zero_optimization"
"""The section of training configs that `zero` is."""


def resolve(
    config: str | Mapping[str, Any] | InferenceConfig | None = None,
    keywords: Mapping[str, Any] | None = None,
    where: str = INLINE,
) -> InferenceConfig:
    """Settings of a config and of keywords, which may share keys where their values agree.

    Sections are merged key by key; a load policy, an injection policy and objects are one value each.

    Args:
        config: a JSON text, or a mapping, or settings made in code; None is no settings.
        keywords: those of `init_inference`.
        where: what the config was read from, for messages.

    Raises:
        ConfigError: lists every mistake, one per line, each with its path.
    """
    problems: list[Problem] = []
    raw: Mapping[str, Any] = {}
    if isinstance(config, str):
        raw, problems = decode(config, where)
    elif isinstance(config, InferenceConfig):
        raw = _given(config)
    elif config is not None:
        raw = config
    problems += find_too_deep(raw)
    if problems:
        raise refuse(where, problems)
    ours = _canonical(InferenceConfig, raw, "", problems)
    theirs = _canonical(InferenceConfig, keywords or {}, "", problems)
    settings = _merge(ours, theirs, "", (where, KEYWORDS), problems)
    settings, doubled = forward(settings)
    problems += doubled
    for problem in doubled:
        settings.pop(problem.path.partition(".")[0], None)
    of_site = _lay_site_under(settings, problems)
    found = _build(settings, problems)
    if found is not None:
        problems += _find_conflicts(found)
    if problems or found is None:
        raise refuse(where if config is not None else KEYWORDS, name_source(problems, of_site))
    return found


def _lay_site_under(settings: dict[str, Any], problems: list[Problem]) -> legacy.Translation:
    """Put what the site says of `zero_optimization` under `zero`; return which settings are the site's.

    But for the stage, which is about training: defaults for stage 3 are for models whose parameters are streamed.

    Raises:
        ConfigError: the site file itself is wrong.
    """
    site, zero = current(), settings.get("zero")
    if not site.path:
        return legacy.Translation({})
    done = legacy.Translation({} if zero is None else {_TRAINING: zero}, spelled={_TRAINING: "zero"})
    streams = isinstance(zero, Mapping) and zero.get("stage") == 3
    lay_section_under(done, site, _TRAINING, but=("stage",), has_defaults=streams)
    problems += done.problems
    if _TRAINING in done.data:
        settings["zero"] = done.data[_TRAINING]
    return legacy.Translation({}, of_site={done.as_spelled(path): origin for path, origin in done.of_site.items()})


def _given(section: Section) -> dict[str, Any]:
    return {name: getattr(section, name) for name in section.model_fields_set}


def _plain(value: Any) -> Any:
    """What is given of a section and of those inside of it."""
    return {key: _plain(entry) for key, entry in _given(value).items()} if isinstance(value, Section) else value


def _canonical(kind: type[Section], given: Mapping[Any, Any], prefix: str, problems: list[Problem]) -> dict[str, Any]:
    """Entries by first spellings and in the form that two sources are compared in."""
    for key in given:
        if not isinstance(key, str):
            problems.append(Problem(prefix.rstrip("."), f"a key must be a text, found {show(key)}"))
    named = {key: value for key, value in given.items() if isinstance(key, str) and not legacy.is_comment(key)}
    formed = {key: _form(kind, key, value, f"{prefix}{key}", problems) for key, value in named.items()}
    settings, doubled = rename(kind, formed, prefix)
    problems += doubled
    return settings


def _form(kind: type[Section], key: str, value: Any, path: str, problems: list[Problem]) -> Any:
    """One value: numbers and switches that stand for sections become sections, and names of dtypes dtypes."""
    name = getattr(kind, "ALIASES", {}).get(key, key)
    info = kind.model_fields.get(name)
    inner = None if info is None else inner_section(info.annotation)[0]
    if kind is InferenceConfig:
        spread: Mapping[str, Callable[[Any], Any]] = {"dtype": read_dtype, "quant": spread_quant, "moe": spread_moe}
        value = spread.get(name, lambda same: same)(value)
    if inner is None:
        return value
    if isinstance(value, Section):
        value = _plain(value) if name == "zero" else _given(value)
    if name == "zero" and isinstance(value, Mapping | bool):
        return _of_training(value, problems)
    return _canonical(inner, value, f"{path}.", problems) if isinstance(value, Mapping) else value


def _of_training(value: Any, problems: list[Problem]) -> Any:
    """The section `zero` as files of training may have it: old spellings, "auto", numbers in quotes."""
    done = legacy.translate({_TRAINING: value}, text_keys(added.root()), partial(knows, added.root()))
    problems += [each._replace(path=each.path.replace(_TRAINING, "zero", 1)) for each in done.problems]
    return done.data[_TRAINING]


def _merge(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str, names: tuple[str, str], problems: list[Problem]
) -> dict[str, Any]:
    """Both, and a problem for each key that has two values."""
    merged = dict(ours)
    for key, value in theirs.items():
        there, path = merged.get(key), f"{prefix}{key}"
        is_section = section_at(InferenceConfig, path.split(".")) is not None
        if key not in merged:
            merged[key] = value
        elif is_section and isinstance(there, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(there, value, f"{path}.", names, problems)
        elif not is_same(there, value):
            what = f"{show(there)} in the {names[0]} and {show(value)} in the {names[1]}"
            problems.append(Problem(path, what, "keep one of them"))
    return merged


def _build(settings: dict[str, Any], problems: list[Problem]) -> InferenceConfig | None:
    try:
        return InferenceConfig.model_validate(settings)
    except ValidationError as error:
        told = {problem.path for problem in problems}
        found = from_validation(error, _names_at, _homes(), lambda _: False)
        problems += [problem for _, problem in found if problem.path not in told]
        return None


def _names_at(location: Location) -> list[str]:
    section = section_at(InferenceConfig, [key for key in location if isinstance(key, str)])
    return [] if section is None else [*section.model_fields, *getattr(section, "ALIASES", {})]


def _homes() -> dict[str, list[str]]:
    homes: dict[str, list[str]] = {}
    for entry in walk(InferenceConfig):
        homes.setdefault(entry.name, []).append(entry.path)
    return homes


def _find_conflicts(config: InferenceConfig) -> list[Problem]:
    """Settings that are legal one by one and not together."""
    found = []
    if config.min_out_tokens > config.max_out_tokens:
        what = f"{config.min_out_tokens} is more than max_out_tokens, which is {config.max_out_tokens}"
        found.append(Problem("min_out_tokens", what, "raise max_out_tokens"))
    policies = (config.injection_policy or {}).values()
    has_names = config.injection_policy_tuple or any(not isinstance(policy, type) for policy in policies)
    if config.replace_with_kernel_inject and has_names:
        what = "names of layers are for slicing, and replace_with_kernel_inject chooses layers by itself"
        found.append(Problem("injection_policy", what, "keep one of them, or name a policy of fused layers"))
    if config.tensor_parallel.mpu is not None and config.tensor_parallel.tp_group is not None:
        found.append(Problem("tensor_parallel.tp_group", "tensor_parallel.mpu is given too", "keep one of them"))
    return found
