"""Scope in which parameters are sharded as modules are constructed: `zero.Init` enters it, builders ask it."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Scope(Protocol):
    """Object that shards parameters as modules are constructed."""

    def paused(self) -> AbstractContextManager[None]:
        """As the function below."""

    def building(self, module: Any, group: Any) -> AbstractContextManager[None]:
        """As the function below."""

    def copied(self, module: Any) -> Any:
        """As the function below."""


_scope: Scope | None = None


def enter(scope: Scope) -> None:
    """Enter the scope."""
    global _scope
    _scope = scope


def leave() -> None:
    """Leave the scope."""
    global _scope
    _scope = None


def paused() -> AbstractContextManager[None]:
    """Context in which modules are constructed without being sharded, whatever scope there is."""
    return nullcontext() if _scope is None else _scope.paused()


def copied(module: Any) -> Any:
    """A deep copy of a torch module, whose parameters are sharded as those of constructed ones.

    Collective over: the ranks of the scope, if there is one.
    """
    return copy.deepcopy(module) if _scope is None else _scope.copied(module)


def building(module: Any, group: Any) -> AbstractContextManager[None]:
    """Context in which the parts of `module` are constructed by the ranks of `group` alone, and sharded over them.

    Does nothing outside of a scope.

    Args:
        module: the torch module; at the end all its unsharded parameters are sharded.
        group: the `mesh.Comm` of the ranks that construct the same parts.

    Collective over: `group`.

    Raises:
        UsageError: on this rank, on entering, if the scope shards over some of these ranks and some others.
        MpispeedError: another rank of `group` has failed to construct them.
    """
    return nullcontext() if _scope is None else _scope.building(module, group)
