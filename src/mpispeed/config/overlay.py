"""Values laid over the settings that scripts give, for as long as the tuner tries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mpispeed.config.batch import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH

_KINDS = ("optimizer", "scheduler")
"""Sections whose parameters belong to their type: those of another type are not mixed with them."""

_SIZES = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)

_values: Mapping[str, Any] = {}


@contextmanager
def laid_over(values: Mapping[str, Any]) -> Iterator[None]:
    """Context in which all settings that are read for a run have these values. Local."""
    global _values
    before, _values = _values, values
    try:
        yield
    finally:
        _values = before


def merged(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with the values laid over them; `raw` itself where there are none.

    Sections are merged key by key. "auto" stands back where the script has a value, as transformers does, which fills
    such values in before it hands the settings on. Of the three batch sizes, of which two are enough, the script's
    micro-batch size stays first.
    """
    if not _values:
        return raw
    given = [name for name in _SIZES if _values.get(name, "auto") != "auto"]
    own = [name for name in _SIZES if name not in given and raw.get(name, "auto") != "auto"]
    dropped = own[max(0, 2 - len(given)) :] if given else []
    return _merge({name: value for name, value in raw.items() if name not in dropped}, _values)


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for name, value in above.items():
        own = below.get(name)
        if value == "auto" and name in below:
            continue
        if isinstance(value, Mapping) and isinstance(own, Mapping) and not _differ(name, own, value):
            found[name] = _merge(own, value)
        else:
            found[name] = value
    return found


def _differ(name: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    kinds = (str(section.get("type")).lower() for section in (below, above))
    return name in _KINDS and len(set(kinds)) > 1
