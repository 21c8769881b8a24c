"""Floor 1: the user's settings. Reads, translates and validates them; the only package with pydantic.

It decides nothing that depends on ranks beyond the arithmetic of batch sizes, and knows no torch and no MPI.
Parts never see these models: the engine turns them into plain values.
"""

from __future__ import annotations

from mpispeed.config.plugins import without_plugins

with without_plugins():
    from mpispeed.config.accept import accept, load_for_run
    from mpispeed.config.batch import resolve_batch
    from mpispeed.config.explain import Row, explain
    from mpispeed.config.load import LoadedConfig, load, parse, read_source
    from mpispeed.config.root import Config
    from mpispeed.config.schema import schema
    from mpispeed.config.unavailable import require_available

__all__ = [
    "Config",
    "LoadedConfig",
    "Row",
    "accept",
    "explain",
    "load",
    "load_for_run",
    "parse",
    "read_source",
    "require_available",
    "resolve_batch",
    "schema",
]
