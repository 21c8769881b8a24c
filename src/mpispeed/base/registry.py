"""One name -> object table with suggestions; used for optimizers, schedules, sinks and their like."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from mpispeed.base.errors import ConfigError

T = TypeVar("T")


def suggest(word: str, choices: Iterable[str], count: int = 1) -> list[str]:
    """Names of `choices` that look like `word`, best first, compared without case."""
    by_lower = {choice.lower(): choice for choice in choices}
    return [by_lower[hit] for hit in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=0.6)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The sentence ' Did you mean "x"?', or nothing."""
    hits = suggest(word, choices)
    return f' Did you mean "{hits[0]}"?' if hits else ""


class Registry(Generic[T]):
    """A table of named objects; `kind` is what an entry is called in messages."""

    def __init__(self, kind: str, *, ignore_case: bool = False) -> None:
        self.kind = kind
        self._ignore_case = ignore_case
        self._entries: dict[str, T] = {}

    def _key(self, name: str) -> str:
        return name.lower() if self._ignore_case else name

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters an object under `name`; a second entry of that name is an error."""

        def enter(entry: T) -> T:
            key = self._key(name)
            if key in self._entries:
                msg = f"{self.kind} {name!r} is registered twice"
                raise ValueError(msg)
            self._entries[key] = entry
            return entry

        return enter

    def __contains__(self, name: str) -> bool:
        return self._key(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[self._key(name)]
        except KeyError:
            known = ", ".join(sorted(self._entries))
            msg = f"unknown {self.kind} {name!r}; known: {known}.{did_you_mean(name, self._entries)}"
            raise ConfigError(msg) from None
