"""Untrusted input, and secrets in output.

Files that may be pipes or devices, texts with control characters for terminals, keys and passwords.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SET = "(set)"
"""Placeholder shown and stored for a secret."""

_SECRET = re.compile(
    r"(api|access|private|secret)[_-]?keys?|^keys?$|secret|passw|passphrase|pwd$|credential", re.IGNORECASE
)
#: names under which a number is a count, as in max_tokens
_SECRET_TEXT = re.compile(r"tokens?([_-]?value)?$|auth(orization)?$|bearer", re.IGNORECASE)
#: further names of options, of which any key is one: a config's experiment_key is none
_SECRET_OPTION = re.compile(r"[_-]keys?$", re.IGNORECASE)
_SIGNS = re.compile(r"[=:]")
_NUMBER = re.compile(r"[+-]?[0-9][0-9.eE+-]*")
#: the user part of an address with a password, or with a token as the user
_USER = re.compile(r"(?<=://)(?:[^/@\s]*:[^/@\s]*|[^/@\s]{20,})(?=@)")


def read_plain(path: Path, limit_bytes: int, *, follows_links: bool = False) -> bytes:
    """All bytes of an ordinary file; a pipe or a device is not waited for.

    Args:
        path: of the file.
        limit_bytes: more than so many are refused.
        follows_links: whether `path` itself may be a symbolic link.

    Raises:
        OSError: it cannot be read, is no ordinary file, or has more than `limit_bytes` bytes.
    """
    raw = _read(path, limit_bytes + 1, follows_links=follows_links)
    if len(raw) > limit_bytes:
        msg = f"it has more than {limit_bytes} bytes"
        raise OSError(msg)
    return raw


def read_head(path: Path, most_bytes: int) -> bytes:
    """The first bytes of an ordinary file that is no link, at most so many. Raises as `read_plain`."""
    return _read(path, most_bytes, follows_links=False)


def _read(path: Path, most_bytes: int, *, follows_links: bool) -> bytes:
    flags = os.O_NONBLOCK | (0 if follows_links else os.O_NOFOLLOW)
    with open(path, "rb", opener=lambda name, wanted: os.open(name, wanted | flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            msg = "it is no ordinary file"
            raise OSError(msg)
        return file.read(min(status.st_size + 1, most_bytes))  # memory is set aside for all that is asked for


def read_json(raw: bytes) -> Any:
    """The value of a line of JSON that somebody else wrote.

    Raises:
        ValueError: it is none; says where, in words that follow the name of the place.
    """
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as failure:
        msg = f"byte {failure.start} of it is no UTF-8; convert the file (iconv -t UTF-8)"
        raise ValueError(msg) from None
    except json.JSONDecodeError as failure:
        msg = f"it is no JSON ({failure.msg.removesuffix(' at')} at letter {failure.colno})"
        raise ValueError(msg) from None
    except ValueError:  # Python reads whole numbers of some 4300 digits
        msg = "it has a number of too many digits"
        raise ValueError(msg) from None
    except RecursionError:
        msg = "its JSON is nested too deep"
        raise ValueError(msg) from None


def printable(text: str, most: int | None = None) -> str:
    """`text` on one line, in printable characters: others are escaped, and the rest beyond `most` is cut off."""
    shown = text[:most]
    if not shown.isprintable():
        shown = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in shown)
    return f"{shown}..." if most is not None and len(text) > most else shown


def hide_secrets(tree: Any) -> Any:
    """Copy unvalidated settings, with `SET` for values under the name of a key or a password.

    Switches and empty values stay, and numbers under names such as max_tokens.
    """
    if isinstance(tree, Mapping):
        return {name: SET if _is_secret(str(name), entry) else hide_secrets(entry) for name, entry in tree.items()}
    return [hide_secrets(entry) for entry in tree] if isinstance(tree, (list, tuple)) else tree


def hide_in_words(words: Sequence[str]) -> list[str]:
    """Copy the words of a command, with `SET` for what a key or a password is given as.

    Known are `--name value`, `--name=value`, `NAME=value`, `--set=section.name=value`, `name: value`, JSON objects, and
    passwords within addresses.
    """
    shown: list[str] = []
    name = ""  # of an option whose value may be the next word
    for word in words:
        if name and not word.startswith("-") and _is_secret_word(name, word):
            shown.append(SET)
        else:
            shown.append(_USER.sub(SET, _hidden_json(word) if "{" in word else _hidden_value(word)))
        name = word.lstrip("-") if word.startswith("-") and "=" not in word else ""
    return shown


def _hidden_value(word: str) -> str:
    """A word without the value behind a name of a secret and "=" or ":", wherever that is in the word."""
    for sign in _SIGNS.finditer(word):
        name = re.split(r"[=:.?&/\s]", word[: sign.start()])[-1].lstrip("-")
        if name and _is_secret_word(name, word[sign.end() :].strip()):
            return f"{word[: sign.end()]}{SET}"
    return word


def _is_secret_word(name: str, value: str) -> bool:
    return bool(value and _SECRET_OPTION.search(name)) or _is_secret(name, _value_of(value))


def _value_of(word: str) -> str | float:
    return 1.0 if _NUMBER.fullmatch(word) else word


def _hidden_json(word: str) -> str:
    """A word that may be a JSON object, alone or behind "=", without its secrets."""
    head, sign, value = word.partition("=")
    if sign and "{" not in head and _is_secret_word(head.lstrip("-"), value):
        return f"{head}={SET}"
    text = value if sign and value.lstrip().startswith("{") else word
    if not text.lstrip().startswith("{"):
        return _hidden_value(word)
    try:
        hidden = json.dumps(hide_secrets(json.loads(text)))
    except (ValueError, RecursionError):
        return f"{head}={SET}" if text is value else SET  # whatever it is, it is not looked through
    return f"{head}={hidden}" if text is value else hidden


def _is_secret(name: str, entry: Any) -> bool:
    if _SECRET.search(name):
        return _holds(entry, (str, bytes, int, float))
    return _SECRET_TEXT.search(name) is not None and _holds(entry, (str, bytes))


def _holds(entry: Any, kinds: tuple[type, ...]) -> bool:
    """True if `entry` is of one of these kinds and not empty, or contains one that is."""
    if isinstance(entry, Mapping):
        return any(_holds(part, kinds) for part in entry.values())
    if isinstance(entry, (list, tuple)):
        return any(_holds(part, kinds) for part in entry)
    return isinstance(entry, kinds) and not isinstance(entry, bool) and entry not in ("", b"")
