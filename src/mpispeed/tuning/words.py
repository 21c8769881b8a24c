"""The file of settings among the words of a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CONFIG_OPTIONS = ("--deepspeed_config", "--deepspeed-config", "--deepspeed", "--config")
"""Words of a script before the name of its config."""


def config_of(arguments: Sequence[str]) -> Path | None:
    """The file of settings among the words of a script; None without one that ends in .json."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in CONFIG_OPTIONS:
            text = value if equals else next(iter(arguments[place + 1 :]), "")
            if text.endswith(".json"):
                return Path(text)
    return None


def with_config(arguments: Sequence[str], file: Path) -> list[str]:
    """The words of a script with another file of settings; words without one stay as they are."""
    found = list(arguments)
    for place, word in enumerate(found):
        name, equals, value = word.partition("=")
        if name in CONFIG_OPTIONS and equals and value.endswith(".json"):
            found[place] = f"{name}={file}"
        elif place and found[place - 1] in CONFIG_OPTIONS and word.endswith(".json"):
            found[place] = str(file)
    return found
