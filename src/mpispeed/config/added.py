"""Sections that features outside of this package add to the settings, each under a top-level key of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import Field, create_model

from mpispeed.base.errors import UsageError
from mpispeed.config import legacy
from mpispeed.config.root import Config
from mpispeed.config.section import Section

_sections: dict[str, type[Section]] = {}
_root: type[Config] = Config


def add_section(key: str, kind: type[Section]) -> None:
    """Let settings have the section `key`; read afterwards as `config.<key>`, with defaults where it is left out.

    Raises:
        UsageError: the key is taken, or is no name; `kind` is no `Section`, or has a field without a default.
    """
    taken = key in Config.model_fields or key in _sections or any(alias.old == key for alias in legacy.ALIASES)
    if taken or not key.isidentifier() or key.startswith("_"):
        why = "is a key already" if taken else "is no name for a key"
        msg = f"a section cannot be added as {key!r}, which {why}; choose another name for the feature"
        raise UsageError(msg)
    if not (isinstance(kind, type) and issubclass(kind, Section)):
        msg = f"the section of {key!r} must be a subclass of mpispeed.features.Section, not {kind!r}"
        raise UsageError(msg)
    required = [name for name, info in kind.model_fields.items() if info.is_required()]
    if required:
        msg = f"the section of {key!r} needs defaults for {', '.join(required)}: settings may leave the section out"
        raise UsageError(msg)
    _change({**_sections, key: kind})


def remove_section(key: str) -> None:
    """Take back what `add_section` added; settings that were read stay as they are."""
    _change({name: kind for name, kind in _sections.items() if name != key})


def added() -> Mapping[str, type[Section]]:
    """The sections that were added, by their keys."""
    return MappingProxyType(_sections)


def root() -> type[Config]:
    """The model of all settings, with the sections that were added."""
    return _root


def _change(sections: dict[str, type[Section]]) -> None:
    global _root
    _sections.clear()
    _sections.update(sections)
    fields: dict[str, Any] = {key: (kind, Field(default_factory=kind)) for key, kind in sections.items()}
    _root = create_model("Config", __base__=Config, **fields) if fields else Config
