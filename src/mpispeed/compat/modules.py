"""Modules made from the table of DeepSpeed's names: `deepspeed.*`, and the same paths below `mpispeed`.

A finder at the end of `sys.meta_path` makes them, so a file of ours with the path is always found before. They import
what a name needs when it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGES = ("mpispeed", "deepspeed")


class Unserved(AttributeError):
    """A name of DeepSpeed that is not here; the message has the reason."""


class NamesModule(ModuleType):
    """A module whose names stand in the table."""

    def __getattr__(self, name: str) -> Any:
        package, path = _split(self.__name__)
        if name == "__all__":
            return sorted(served(path))
        if package is None or (name.startswith("__") and name not in rows(path)):
            msg = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = lookup(package, path, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *served(_split(self.__name__)[1])})


class Finder:
    """Finds the modules of the table, and tells which feature a missing one belongs to."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module of the table; None for any other name.

        Raises:
            ImportError: `from module import name` asks for a name whose feature is not there yet.
        """
        package, inner = _split(fullname)
        if package is None or not inner or (package == "deepspeed" and package not in sys.modules):
            return None
        if inner in paths():
            return importlib.util.spec_from_loader(fullname, Loader(), is_package=True)
        parent, _, name = inner.rpartition(".")
        reason = missing(parent).get(name)
        if reason is not None:
            msg = f"{fullname} {reason}"
            raise ImportError(msg, name=fullname)
        return None


class Loader(importlib.abc.Loader):
    """Makes the modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, which asks the table."""
        return NamesModule(spec.name, f"DeepSpeed's names of {spec.name.partition('.')[2]}, served by mpispeed.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


def install() -> None:
    """Serve the modules from now on; done once, at the import of mpispeed."""
    if not any(isinstance(finder, type) and finder.__name__ == "Finder" for finder in sys.meta_path):
        sys.meta_path.append(Finder)


def become_deepspeed(name: str) -> None:
    """Make the module that is being imported the package `deepspeed` of the table."""
    install()
    module = sys.modules[name]
    module.__class__ = NamesModule
    del module.__dict__["become_deepspeed"]


def lookup(package: str, path: str, name: str) -> Any:
    """The object that DeepSpeed has as `name` in the module `path`.

    Raises:
        Unserved: it is known, and not here.
        AttributeError: there is no such name.
    """
    where = f"{package}.{path}".rstrip(".")
    home, ours = rows(path).get(name, ("", ""))
    if home:
        module = importlib.import_module(home)
        return getattr(module, ours) if ours else module
    if f"{path}.{name}".lstrip(".") in paths():
        return importlib.import_module(f"{where}.{name}")
    for home in _whole(path):
        if home != where:
            module = importlib.import_module(home)
            if name in getattr(module, "__all__", ()) or (not name.startswith("_") and hasattr(module, name)):
                return getattr(module, name)
    reason = missing(path).get(name)
    if reason is not None:
        msg = f"{where}.{name} {reason}"
        raise Unserved(msg)
    known = ", ".join(sorted(name for name in served(path) if not name.startswith("_")))
    msg = f"module {where!r} has no attribute {name!r}; its public names are {known or 'none'}"
    raise AttributeError(msg)


def _split(fullname: str) -> tuple[str | None, str]:
    package, _, path = fullname.partition(".")
    return (package if package in _PACKAGES else None), path


@cache
def paths() -> frozenset[str]:
    """All modules of the table, and the packages that they are in."""
    from mpispeed.compat.names import LATER, NEVER, SERVED

    unserved = [path for modules in (*LATER.values(), *NEVER.values()) for path in modules]
    known = {path for path in (*SERVED, *unserved) if path}
    for path in tuple(known):
        parts = path.split(".")
        known.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(known)


@cache
def rows(path: str) -> Mapping[str, tuple[str, str]]:
    """Names of one module of DeepSpeed -> (module, name) here; the name is empty for the module itself."""
    from mpispeed.compat.names import SERVED

    found = {}
    for home, names in SERVED.get(path, {}).items():
        for word in names.split():
            if word != "*":
                ours, equals, theirs = word.partition("=")
                found[theirs if equals else ours] = (home, ours)
    return found


@cache
def missing(path: str) -> Mapping[str, str]:
    """Names of one module of DeepSpeed that are not here -> the reason."""
    from mpispeed.base.version import VERSION
    from mpispeed.compat.names import LATER, NEVER

    reasons = {f"belongs to {feature}, which mpispeed {VERSION} does not have yet": LATER[feature] for feature in LATER}
    reasons.update({f"is not here: {reason}": NEVER[reason] for reason in NEVER})
    return {name: reason for reason, modules in reasons.items() for name in modules.get(path, "").split()}


def served(path: str) -> Iterator[str]:
    """Names that one module of DeepSpeed has here."""
    start = f"{path}." if path else ""
    inner = {other[len(start) :] for other in paths() if other.startswith(start)}
    whole = (name for home in _whole(path) for name in getattr(importlib.import_module(home), "__all__", ()))
    yield from {*rows(path), *whole, *(name for name in inner if "." not in name)}


def _whole(path: str) -> Iterator[str]:
    from mpispeed.compat.names import SERVED

    yield from (home for home, names in SERVED.get(path, {}).items() if "*" in names.split())
