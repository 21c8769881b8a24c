"""Mistakes in a configuration, collected and reported in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mpispeed.base.errors import ConfigError
from mpispeed.base.registry import suggest

# Far more than any legal setting needs, and far less than Python's own limit on recursion.
MAX_DEPTH = 32


class Problem(NamedTuple):
    """One mistake: where it stands in the file, what is wrong, what to do."""

    path: str
    what: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.path}: {self.what}" if self.path else self.what
        return f"{line}; {self.cure}" if self.cure else line


def refuse(where: str, problems: Iterable[Problem]) -> ConfigError:
    """One error for all problems, one line each, without repetitions."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        return ConfigError(f"{where}: {lines[0]}")
    listed = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{where}: {len(lines)} problems{listed}")


def show(value: Any) -> str:
    """A value as it would stand in the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = _repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python prints no whole number of thousands of digits
        return f"a {type(value).__name__} too large to print"


def find_too_deep(tree: Any) -> list[Problem]:
    """The first object or list below `MAX_DEPTH` others, if there is one; never recurses itself."""
    stack: list[tuple[str, int, Any]] = [("", 0, tree)]
    while stack:
        path, depth, node = stack.pop()
        if not isinstance(node, (Mapping, list, tuple)):
            continue
        if depth > MAX_DEPTH:
            return [Problem(path, f"objects and lists are nested deeper than {MAX_DEPTH} levels", "flatten them")]
        entries = node.items() if isinstance(node, Mapping) else enumerate(node)
        stack += [(join(path, key if isinstance(key, int) else str(key)), depth + 1, entry) for key, entry in entries]
    return []


def join(path: str, key: str | int) -> str:
    """The path of an entry below `path`: a.b, a.b[0]."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def path_of(location: Iterable[str | int]) -> str:
    """A path from keys and list positions."""
    path = ""
    for key in location:
        path = join(path, key)
    return path


_WANTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_parsing": "a number",
    "float_type": "a number",
    "number_type": "a number",
    "bytes_type": "bytes, such as 4000000000, 4e9 or 4GiB",
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "list_type": "a list [...]",
    "dict_type": "a section {...}",
    "model_type": "a section {...}",
    "model_attributes_type": "a section {...}",
}
_LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def from_validation(
    error: ValidationError,
    names_at: Callable[[tuple[str | int, ...]], list[str]],
    homes: Mapping[str, list[str]],
) -> list[tuple[tuple[str | int, ...], Problem]]:
    """Problems, with their locations, from what the models refused.

    Args:
        error: what validation raised.
        names_at: the keys that are known in the section at a location.
        homes: key -> sections that have such a key, to say where a misplaced key belongs.
    """
    found = []
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        path = path_of(location)
        if detail["type"] == "extra_forbidden":
            cure = _cure_unknown(str(location[-1]), path, names_at(location[:-1]), homes)
            problem = Problem(path, f"unknown key (value {show(detail['input'])})", cure)
        else:
            problem = Problem(path, *_describe(detail))
        found.append((location, problem))
    return found


def _cure_unknown(key: str, path: str, names: list[str], homes: Mapping[str, list[str]]) -> str:
    close = suggest(key, names)
    if close:
        return f'did you mean "{close[0]}"?'
    elsewhere = [home for home in homes.get(key, ()) if home != path]
    if elsewhere and len(elsewhere) <= 3:
        return f"it belongs at {' or '.join(elsewhere)}"
    return "remove it, or begin it with _ to make it a comment"


def _describe(detail: ErrorDetails) -> tuple[str, str]:
    """What is wrong with one value, and the cure."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return "required but missing", ""
    if kind == "literal_error":
        expected = str(context.get("expected", "")).replace("'", '"')
        close = suggest(value, expected.replace('"', "").replace(" or ", ", ").split(", ")) if _is_text(value) else []
        return f"expected {expected}, found {show(value)}", f'did you mean "{close[0]}"?' if close else ""
    for name, words in _LIMITS.items():
        if name in context:
            return f"must be {words} {context[name]}, found {show(value)}", ""
    wanted = _WANTED.get(kind)
    if wanted is None:
        return f"{detail['msg']}, found {show(value)}", ""
    return f"expected {wanted}, found {show(value)}", ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
