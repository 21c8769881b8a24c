"""Table of sinks by the name of their section, and the construction of those that a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from mpispeed.base.errors import NativeMissing
from mpispeed.base.registry import Registry
from mpispeed.monitor import csv_sink, tensorboard_sink
from mpispeed.monitor.remote import RemoteSinks
from mpispeed.monitor.sink import Sink


@dataclass(frozen=True, slots=True)
class Backend:
    """Constructor of a sink from its section, and what it needs.

    Attributes:
        create: makes the sink; None if it belongs into a process of its own.
        module: that it needs.
    """

    create: Callable[[Mapping[str, Any]], Sink] | None
    module: str | None = None


SINKS: Registry[Backend] = Registry("monitor")
SINKS.register("csv_monitor")(Backend(csv_sink.CsvSink.from_section))
SINKS.register("tensorboard")(Backend(tensorboard_sink.TensorBoardSink.from_section, module="tensorboard"))
SINKS.register("wandb")(Backend(None, module="wandb"))
SINKS.register("comet")(Backend(None, module="comet_ml"))


def build(sections: Mapping[str, Mapping[str, Any]], rank: int) -> list[Sink]:
    """The sinks of the enabled sections, by section name; none on ranks other than 0.

    Names and installed modules are checked on every rank, so that a mistake ends all of them. Libraries that use the
    network run in one process of their own, which is told the sections, keys included, by a pipe.

    Raises:
        ConfigError: an enabled section has no sink of its name.
        NativeMissing: the library that a sink writes with is not installed.
    """
    enabled = {name: section for name, section in sections.items() if section.get("enabled", False)}
    backends = {name: _checked(name) for name in enabled}
    if rank:
        return []
    made: list[Sink] = []
    remote = {}
    for name, section in enabled.items():
        create = backends[name].create
        if create is None:
            remote[name] = section
        else:
            made.append(create(section))
    return [*made, RemoteSinks(remote)] if remote else made


def _checked(name: str) -> Backend:
    backend = SINKS[name]
    if backend.module is None:
        return backend
    found = find_spec(backend.module)
    # Without an origin it is a mere folder of that name; wandb makes one where a script runs.
    if found is None or found.origin is None:
        msg = (
            f'"{name}" is enabled, but the Python package {backend.module} is not installed; '
            f"install it (pip install {backend.module}) or set {name}.enabled to false"
        )
        raise NativeMissing(msg)
    return backend
