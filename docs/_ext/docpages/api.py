"""The API reference: a page per public module, with signatures and whole docstrings.

Docstrings are Markdown in Google's style, which autodoc would read as reStructuredText; so they are written into the
directives of Sphinx's Python domain here. The list of names and the signatures are those of tools/api_reference.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import mpispeed
from docpages.links import slug
from docpages.markdown import docstring, escaped, table, toctree

Pages = Iterator[tuple[str, str]]


def tool(root: Path, name: str) -> Any:
    """A module of the folder tools/."""
    spec = importlib.util.spec_from_file_location(name, root / "tools" / f"{name}.py")
    if spec is None or spec.loader is None:
        message = f"there is no tools/{name}.py in {root}"
        raise FileNotFoundError(message)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(root: Path) -> Pages:
    """(page, text) of the reference and its index."""
    reference = tool(root, "api_reference")
    modules = {"mpispeed": sorted(name for names in mpispeed.PUBLIC_NAMES.values() for name in names)}
    for name in mpispeed.PUBLIC_MODULES:
        modules[f"mpispeed.{name}"] = sorted(importlib.import_module(f"mpispeed.{name}").__all__)
    yield "reference/api", index(modules)
    firsts = first_names(modules)
    for place, names in modules.items():
        lines = [f"# `{place}`", "", *docstring(importlib.import_module(place).__doc__)]
        lines += [f":::{{py:module}} {place}", ":no-index-entry:", ":::", ""]
        for name in names:
            lines += entry(reference, place, name, firsts)
        yield f"reference/api/{place}", "\n".join(lines)


def index(modules: dict[str, list[str]]) -> str:
    """All modules with their names."""
    lines = [
        "# API reference",
        "",
        "All public names. Whatever is not here can change at any time. Names of the package and its modules are there",
        "after `import mpispeed`. [Keys of the configuration](config.md) and [environment variables](environment.md)",
        "have pages of their own.",
        "",
    ]
    for place, names in modules.items():
        lines += [f"## `{place}`", ""]
        lines += [f"[All of it](api/{place}.md): {first_paragraph(importlib.import_module(place))}", ""]
        module = importlib.import_module(place)
        rows = [
            (f"[`{name}`](api/{place}.md#{slug(f'{place}.{name}')})", first_paragraph(getattr(module, name)))
            for name in names
        ]
        lines += table(("name", "what"), rows)
    return "\n".join([*lines, *toctree(f"reference/api/{place}" for place in modules)])


def first_paragraph(found: Any) -> str:
    """What a name is, in one line; for values their type."""
    if not callable(found) and not isinstance(found, ModuleType):
        return f"A `{type(found).__name__}`."
    text = found.__doc__ if isinstance(found, type) else inspect.getdoc(found)
    return escaped(" ".join(inspect.cleandoc(text or "").split("\n\n")[0].split()))


def first_names(modules: dict[str, list[str]]) -> dict[int, str]:
    """For what can be called, by its id, the name under which it comes first."""
    firsts: dict[int, str] = {}
    for place, names in modules.items():
        module = importlib.import_module(place)
        for name in names:
            found = getattr(module, name)
            if callable(found):
                firsts.setdefault(id(found), f"{place}.{name}")
    return firsts


def entry(reference: Any, place: str, name: str, firsts: dict[int, str]) -> Iterator[str]:
    """A heading, the signature, the docstring; for classes of the package their methods and properties."""
    found = getattr(importlib.import_module(place), name)
    full = f"{place}.{name}"
    yield f"## `{full}`\n"
    other = firsts.get(id(found), full)
    if other != full:
        page = other.rpartition(".")[0]
        yield f"As [`{other}`]({page}.md#{slug(other)}).\n"
        return
    if isinstance(found, ModuleType):
        yield from docstring(found.__doc__)
    elif not callable(found):
        yield from (f"::::{{py:data}} {name}", f":type: {type(found).__name__}", "::::", "")
    else:
        is_class = isinstance(found, type)
        yield f"::::{{py:{'class' if is_class else 'function'}}} {name}{one_line(reference.signature(found))}"
        yield ""
        yield from docstring(found.__doc__ if is_class else inspect.getdoc(found))
        if is_class:
            yield from members(reference, found)
        yield from ("::::", "")


def members(reference: Any, cls: type) -> Iterator[str]:
    """Directives of the public methods and properties that the package defines, base classes included."""
    if names := reference.members_of_enum(cls):
        yield f"{names}\n"
        return
    for name, value in reference.public_members(cls):
        plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(value, property | reference.Value):
            yield f":::{{py:property}} {name}"
        elif inspect.isfunction(plain):
            call = reference.call(plain, drops_first=not isinstance(value, staticmethod))
            yield f":::{{py:method}} {name}{call}"
            yield from [":classmethod:"] if isinstance(value, classmethod) else []
            yield from [":staticmethod:"] if isinstance(value, staticmethod) else []
        else:
            continue
        yield ""
        yield from docstring(inspect.getdoc(value if isinstance(value, property | reference.Value) else plain))
        yield from (":::", "")


def one_line(signature: str | None) -> str:
    """A signature without line ends, as a directive takes it."""
    text = " ".join((signature or "").split())
    return text.replace("( ", "(").replace(", )", ")").replace(",)", ")")
