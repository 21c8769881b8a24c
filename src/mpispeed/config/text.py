"""JSON text to plain values: comments and trailing commas are allowed, a key twice in one object is not.

A text that is no JSON is read as HJSON (keys and texts without quotes) where the package hjson is installed.
"""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

from mpispeed.config.problems import MAX_DEPTH, Problem, join, refuse

# Unclosed ones match to the end too, so that nothing is searched twice; they are left, and refused.
_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
_TRAILING_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"?|,(?=\s*[}\]])', re.DOTALL)
_INSTALL = 'pip install "mpispeed[hjson]"'
_SIGN = re.compile(r"[^\n]")
_HINTS = (
    ("property name", "keys and texts need double quotes"),
    ("Expecting value", "a value is missing here, or a text lacks its double quotes"),
    ("delimiter", "a comma, colon or closing bracket is missing before this place"),
)


class _Pairs(list[tuple[str, Any]]):
    """The entries of one object in order, before duplicate keys are looked for."""


def decode(text: str, where: str) -> tuple[dict[str, Any], list[Problem]]:
    """The object in a JSON text, and a problem for each duplicate key in one object.

    Raises:
        ConfigError: the text is no JSON or holds no object.
    """
    try:
        tree = _read(text)
    except json.JSONDecodeError as error:
        hint = next((hint for word, hint in _HINTS if word in error.msg), "")
        if not _has_hjson():
            hint += f"{'; ' if hint else ''}if this is HJSON: {_INSTALL}"
        place = f"line {error.lineno}, column {error.colno}"
        raise refuse(where, [Problem(place, f"this is no JSON: {error.msg}", hint)]) from None
    except ValueError as error:  # a number with thousands of digits
        raise refuse(where, [Problem("", f"this is no JSON: {error}")]) from None
    except RecursionError:
        raise refuse(where, [Problem("", "this is no JSON: brackets are nested too deeply")]) from None
    if not isinstance(tree, _Pairs):
        what = f"a configuration is a JSON object {{...}}, found {type(tree).__name__}"
        raise refuse(where, [Problem("", what)])
    problems: list[Problem] = []
    value: dict[str, Any] = _settle(tree, "", problems)
    return value, problems


def _read(text: str) -> Any:
    try:
        return _parse(text)
    except json.JSONDecodeError:
        pass
    try:
        return _parse(_blank(_blank(text, _TOKEN), _TRAILING_COMMA))
    except json.JSONDecodeError:
        found = _of_hjson(text)
        if not isinstance(found, _Pairs):
            raise
        return found


def _has_hjson() -> bool:
    try:
        importlib.import_module("hjson")
    except ImportError:
        return False
    return True


def _of_hjson(text: str) -> Any:
    """The value of an HJSON text; None if it is none or cannot be read here. One word is a text in HJSON, no object."""
    if not _has_hjson():
        return None
    try:
        return importlib.import_module("hjson").loads(text, object_pairs_hook=_Pairs)
    except RecursionError:
        raise
    except Exception:  # its reader fails in many ways, as by an IndexError for a comment without an end
        return None


def _parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_Pairs)


def _blank(text: str, pattern: re.Pattern[str]) -> str:
    """Overwrite matches that are no strings with spaces, so that places in error messages stay right."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        is_left = found.startswith('"') or (found.startswith("/*") and (len(found) < 4 or not found.endswith("*/")))
        return found if is_left else _SIGN.sub(" ", found)

    return pattern.sub(blank, text)


def _settle(tree: Any, path: str, problems: list[Problem], depth: int = 0) -> Any:
    """Turn objects into dicts and duplicate keys into problems. Values nested too deep stay, and are refused later."""
    if depth > MAX_DEPTH:
        return tree
    if isinstance(tree, _Pairs):
        result: dict[str, Any] = {}
        for key, value in tree:
            here = join(path, key)
            if key in result:
                problems.append(Problem(here, "the key is there twice in one object", "keep one of them"))
            result[key] = _settle(value, here, problems, depth + 1)
        return result
    if isinstance(tree, list):
        return [_settle(value, join(path, index), problems, depth + 1) for index, value in enumerate(tree)]
    return tree
