"""The API reference: every public name with its signature and what it is.

    python tools/api_reference.py             write docs/reference/api.md
    python tools/api_reference.py --check     fail if the page is not what would be written

The list of names is that of the package root; texts are the first paragraphs of docstrings.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mpispeed
from mpispeed.engine.delegation import Value

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "api.md"
WIDTH = 100
HEAD = """# API reference

All public names; `python tools/api_reference.py` makes this page. Whatever is not here can change at any time. Names of
the package and its modules are there after `import mpispeed`. [Keys of the configuration](config.md) and
[environment variables](environment.md) have pages of their own.
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join((HEAD, *root_section(), *(line for name in mpispeed.PUBLIC_MODULES for line in section(name))))


def root_section() -> Iterator[str]:
    """Names of the package itself, and its modules."""
    yield "## `mpispeed`\n"
    for name in sorted(name for names in mpispeed.PUBLIC_NAMES.values() for name in names):
        yield from entry("mpispeed", name, getattr(mpispeed, name))


def section(name: str) -> Iterator[str]:
    """One public module."""
    module = importlib.import_module(f"mpispeed.{name}")
    yield f"## `mpispeed.{name}`\n"
    yield f"{first_paragraph(module)}\n"
    for public in sorted(module.__all__):
        yield from entry(f"mpispeed.{name}", public, getattr(module, public))


def entry(place: str, name: str, found: Any) -> Iterator[str]:
    """One name: a heading, a signature, a text, and for classes of the package what they offer."""
    yield f"### `{place}.{name}`\n"
    other = told_elsewhere(place, name, found)
    if other:
        yield f"As [`{other}`](#{anchor(other)}).\n"
        return
    if isinstance(found, ModuleType):
        yield f"{first_paragraph(found)}\n"
        return
    if not callable(found):
        yield f"A `{type(found).__name__}`.\n"
        return
    shown = signature(found)
    if shown is not None:
        yield f"```python check\n{name}{shown}\n```\n"
    yield f"{first_paragraph(found)}\n"
    if isinstance(found, type):
        lines = list(members(found))
        if lines:
            yield "\n".join(lines) + "\n"


def told_elsewhere(place: str, name: str, found: Any) -> str:
    """The name under which the page has the same object before, else ""."""
    if isinstance(found, ModuleType) or not callable(found):
        return ""
    for known, other in listed():
        if (known, other) == (place, name):
            return ""
        if getattr(importlib.import_module(known), other) is found:
            return f"{known}.{other}"
    return ""


def listed() -> Iterator[tuple[str, str]]:
    """(module, name) of everything on the page, in its order."""
    for name in sorted(name for names in mpispeed.PUBLIC_NAMES.values() for name in names):
        yield "mpispeed", name
    for module in mpispeed.PUBLIC_MODULES:
        for name in sorted(importlib.import_module(f"mpispeed.{module}").__all__):
            yield f"mpispeed.{module}", name


def anchor(heading: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w-]", "", heading.lower())


def members_of_enum(cls: type) -> str:
    """The names of an enum in a line; "" for other classes."""
    names = ", ".join(f"`{name}`" for name in cls.__members__) if issubclass(cls, enum.Enum) else ""
    return names and f"Members: {names}."


def public_members(cls: type) -> list[tuple[str, Any]]:
    """Names and values that the package defines in a class or its bases, by name."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("mpispeed"):
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    return sorted(found.items(), key=lambda item: item[0])


def members(cls: type) -> Iterator[str]:
    """A line for each public method and property that is defined in the package, base classes included."""
    if names := members_of_enum(cls):
        yield names
        return
    for name, value in public_members(cls):
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(value, property | Value):
            yield f"- `.{name}`: {first_sentence(value)}"
        elif inspect.isfunction(plain):
            yield f"- `.{name}{call(plain, drops_first=not isinstance(value, staticmethod))}`: {first_sentence(plain)}"


def signature(found: Any) -> str | None:
    """Parameters with annotations and defaults, as written; None for what the package does not define itself."""
    target, drops_first = found, False
    if isinstance(found, type):
        maker = found.__init__
        is_own = dataclasses.is_dataclass(found) or getattr(maker, "__module__", "").startswith("mpispeed")
        if not is_own or issubclass(found, enum.Enum):
            return None
        target, drops_first = maker, True
    try:
        plain = inspect.signature(target)
    except (TypeError, ValueError):
        return None
    parts = list(written(list(plain.parameters.values())[1 if drops_first else 0 :]))
    result = "" if plain.return_annotation is plain.empty or isinstance(found, type) else plain.return_annotation
    text = ", ".join(parts)
    if len(text) > WIDTH:
        text = "\n" + "".join(f"    {part},\n" for part in parts)
    return f"({text})" + (f" -> {annotation(result)}" if result != "" else "")


def call(method: Any, *, drops_first: bool) -> str:
    """Names and defaults of a method's parameters."""
    parameters = list(inspect.signature(method).parameters.values())[1 if drops_first else 0 :]
    return "(" + ", ".join(written([parameter.replace(annotation=parameter.empty) for parameter in parameters])) + ")"


def written(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Each parameter as in source, with the marks `/` and `*` between kinds."""
    has_star = False
    for at, parameter in enumerate(parameters):
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        has_star = has_star or mark == "*"
        text = f"{mark}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            text += f": {annotation(parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += (" = " if ":" in text else "=") + default(parameter.default)
        yield text
        following = parameters[at + 1].kind if at + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            yield "/"


def annotation(found: Any) -> str:
    """An annotation as text."""
    return found if isinstance(found, str) else inspect.formatannotation(found)


def default(value: Any) -> str:
    """A default as text; `...` for objects that have no short one."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    shown = repr(value)
    return "..." if shown.startswith("<") or " at 0x" in shown else shown


def first_paragraph(found: Any) -> str:
    """The first paragraph of a docstring in one line."""
    text = found.__doc__ if isinstance(found, type) else inspect.getdoc(found)
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def first_sentence(found: Any) -> str:
    """The first line of a docstring."""
    return inspect.cleandoc(inspect.getdoc(found) or "").split("\n")[0]


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="write docs/reference/api.md")
    parser.add_argument("--check", action="store_true", help="only compare")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
