"""One prompt, and the options of generation that its line may carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mpispeed.base.errors import UsageError
from mpispeed.base.plain import printable

MOST_ANSWERS = 10_000
"""Of one prompt."""

MOST_STOPS = 16
"""Texts that end one answer."""

_MOST_TOKENS = 2**31 - 1

ALIASES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
}
"""Other spellings of options, of transformers and of OpenAI's interface."""


class PromptError(UsageError):
    """Prompts that cannot be answered as they are: the message names the file, the line, the fault and the cure."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of generation; None where nothing is said.

    Attributes:
        max_new_tokens: an answer has at most so many tokens; at least 1.
        temperature: what logits are divided by; 0: the likeliest token is taken.
        top_k: only so many of the likeliest tokens can be drawn; 0: all.
        top_p: only the likeliest tokens that have this probability together can be drawn; in (0, 1].
        repetition_penalty: logits of tokens that were there before are divided (or, if negative, multiplied) by it.
        seed: of the random numbers.
        stop: texts that end the answer and do not belong to it.
        n: answers to the prompt.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    n: int | None = None

    def over(self, defaults: Options) -> Options:
        """These options, and those of `defaults` where nothing is said."""
        said = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) is not None}
        return replace(defaults, **said) if said else defaults


OPTIONS = tuple(field.name for field in fields(Options))
"""Their names."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One answer that is wanted.

    Attributes:
        number: among all answers that are wanted, in the order of the file.
        where: file and line, for messages.
        id: from the file, or the prompt's position in it (from 0) as text.
        sample: which of the answers to this prompt.
        content: a text, token ids, or the messages of a chat.
        options: that the file has for it.
    """

    number: int
    where: str
    id: str
    sample: int
    content: str | tuple[int, ...] | tuple[dict[str, Any], ...]
    options: Options


def options_of(record: Mapping[str, Any]) -> Options:
    """The options among the entries of a record; entries that are null count as not there.

    Raises:
        ValueError: one cannot hold.
    """
    found: dict[str, Any] = {}
    for key in record.keys() & _SPELLINGS:
        name, value = ALIASES.get(key, key), record[key]
        if value is None:
            continue
        if name in found:
            msg = f"{name} is there twice, under two spellings; leave one out"
            raise ValueError(msg)
        found[name] = _CHECKS[name](key, value)
    return Options(**found) if found else _NONE


def _whole(key: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        msg = f"{key} is {_shown(value)}; expected a whole number from {least} to {most}"
        raise ValueError(msg)
    return value


def _real(key: str, value: Any, *, allows_zero: bool, most: float = math.inf) -> float:
    is_number = type(value) in (int, float) and abs(value) <= 1e30
    if not is_number or value < 0 or value > most or (value == 0 and not allows_zero):
        bounds = f"{'at least' if allows_zero else 'above'} 0" + ("" if math.isinf(most) else f" and at most {most:g}")
        msg = f"{key} is {_shown(value)}; expected a number {bounds}"
        raise ValueError(msg)
    return float(value)


def _stops(key: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        msg = f"{key} is {_shown(value)}; expected a text, or a list of texts, none of them empty"
        raise ValueError(msg)
    if len(stops) > MOST_STOPS:
        msg = f"{key} has {len(stops)} texts; expected at most {MOST_STOPS}"
        raise ValueError(msg)
    for each in stops:
        check_text(key, each)
    return tuple(stops)


def check_text(what: str, text: str) -> None:
    """Check that a text of a JSON file is Unicode.

    Raises:
        ValueError: it has half of a surrogate pair, which UTF-8 cannot hold.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = f"{what} has half of a surrogate pair (such as \\ud800), which is no character; write it as UTF-8"
        raise ValueError(msg) from None


def _shown(value: Any) -> str:
    return printable(repr(value), 60)


_CHECKS: dict[str, Any] = {
    "max_new_tokens": lambda key, value: _whole(key, value, 1, _MOST_TOKENS),
    "temperature": lambda key, value: _real(key, value, allows_zero=True),
    "top_k": lambda key, value: _whole(key, value, 0, _MOST_TOKENS),
    "top_p": lambda key, value: _real(key, value, allows_zero=False, most=1.0),
    "repetition_penalty": lambda key, value: _real(key, value, allows_zero=False),
    "seed": lambda key, value: _whole(key, value, -(2**63), 2**64 - 1),
    "stop": _stops,
    "n": lambda key, value: _whole(key, value, 1, MOST_ANSWERS),
}
_SPELLINGS = frozenset({*OPTIONS, *ALIASES})
_NONE = Options()
