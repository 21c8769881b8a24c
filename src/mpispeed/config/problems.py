"""Mistakes in a configuration, collected and reported in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mpispeed.base.errors import ConfigError, ElasticityConfigError
from mpispeed.base.plain import printable
from mpispeed.base.registry import suggest

# Far more than any legal setting needs, and far less than Python's own limit on recursion.
MAX_DEPTH = 32
_MOST_LINES = 100
_MOST_SUGGESTIONS = 50  # looking for a similar name takes far longer than all the rest
_LONGEST_PATH = 200
_LONGEST_LINE = 2000

Location = tuple[str | int, ...]
"""Keys and list positions on the way to a value."""


class Problem(NamedTuple):
    """One mistake: its place in the file, the fault, the cure, and the error that it alone would be."""

    path: str
    what: str
    cure: str = ""
    error: type[ConfigError] = ConfigError

    def __str__(self) -> str:
        path = printable(self.path, _LONGEST_PATH)
        line = f"{path}: {self.what}" if path else self.what
        return f"{line}; {self.cure}" if self.cure else line


def refuse(where: str, problems: Iterable[Problem]) -> ConfigError:
    """One error for all problems, one line each, without repetitions; of very many the first ones.

    Its type is that of the first problem with a type of its own, which DeepSpeed's scripts may catch.
    """
    found = list(dict.fromkeys(problems))
    error = next((kind for kind in map(_error_of, found) if kind is not ConfigError), ConfigError)
    lines = [printable(str(problem), _LONGEST_LINE) for problem in found[:_MOST_LINES]]
    where = printable(where, _LONGEST_LINE)
    if len(found) == 1:
        return error(f"{where}: {lines[0]}")
    listed = "".join(f"\n  {line}" for line in lines)
    more = f"\n  and {len(found) - _MOST_LINES} more" if len(found) > _MOST_LINES else ""
    return error(f"{where}: {len(found)} problems{listed}{more}")


def _error_of(problem: Problem) -> type[ConfigError]:
    is_elastic = problem.path.startswith("elasticity") and problem.error is ConfigError
    return ElasticityConfigError if is_elastic else problem.error


def show(value: Any) -> str:
    """A value as it would stand in the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = _repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def show_unknown(value: Any) -> str:
    """The value of an unknown key: numbers and switches; a text, which may be a password, by its type."""
    kinds = {str: "a text", list: "a list", tuple: "a list", dict: "a section"}
    if value is None or isinstance(value, (bool, int, float)):
        return f"value {show(value)}"
    return next((f"with {name}" for kind, name in kinds.items() if isinstance(value, kind)), type(value).__name__)


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
    names_at: Callable[[Location], list[str]],
    homes: Mapping[str, list[str]],
    is_hidden: Callable[[Location], bool],
) -> list[tuple[Location, Problem]]:
    """Problems, with their locations, from the models' validation error.

    Args:
        error: what validation raised.
        names_at: the keys that are known in the section at a location.
        homes: key -> sections that have such a key, to say where a misplaced key belongs.
        is_hidden: whether the value at a location may be a secret, which is not to be shown.
    """
    found, suggestions = [], Suggestions()
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        path = path_of(location)
        if detail["type"] == "extra_forbidden":
            cure = _cure_unknown(suggestions, str(location[-1]), path, names_at(location[:-1]), homes)
            problem = Problem(path, f"unknown key ({show_unknown(detail['input'])})", cure)
        else:
            problem = Problem(path, *_describe(detail, is_hidden=is_hidden(location)))
        found.append((location, problem))
    return found


class Suggestions:
    """Similar known names, for the first wrong ones only."""

    def __init__(self) -> None:
        self._left = _MOST_SUGGESTIONS

    def __call__(self, key: str, names: Iterable[str]) -> str:
        """The sentence 'did you mean "x"?', or nothing."""
        self._left -= 1
        close = suggest(key, names) if self._left >= 0 and len(key) <= _LONGEST_PATH else []
        return f'did you mean "{close[0]}"?' if close else ""


def _cure_unknown(
    suggestions: Suggestions, key: str, path: str, names: list[str], homes: Mapping[str, list[str]]
) -> str:
    elsewhere = [home for home in homes.get(key, ()) if home != path]
    if elsewhere and len(elsewhere) <= 3:  # the same name says more than a similar one
        return f"it belongs at {' or '.join(elsewhere)}"
    close = suggestions(key, names)
    if close:
        return close
    return "remove it, or begin it with _ to make it a comment"


def _describe(detail: ErrorDetails, *, is_hidden: bool) -> tuple[str, str]:
    """The fault of one value, and the cure."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    found = "a value that is not shown" if is_hidden else show(value)
    if kind == "missing":
        return "required but missing", ""
    if kind == "literal_error":
        expected = str(context.get("expected", "")).replace("'", '"')
        names = expected.replace('"', "").replace(" or ", ", ").split(", ")
        return f"expected {expected}, found {found}", Suggestions()(value, names) if _is_text(value) else ""
    for name, words in _LIMITS.items():
        if name in context:
            return f"must be {words} {context[name]}, found {found}", ""
    wanted = context["wanted"] if kind == "either_type" else _WANTED.get(kind)
    if wanted is None:
        return f"{detail['msg']}, found {found}", ""
    is_quoted = wanted == _WANTED["bool_type"] and _is_text(value) and value.lower() in ("true", "false")
    return f"expected {wanted}, found {found}", "leave out the quotes" if is_quoted else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
