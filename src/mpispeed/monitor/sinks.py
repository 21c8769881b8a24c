"""Table of sinks by the name of their section, and the construction of those that a run asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpispeed.base.errors import NativeMissing
from mpispeed.base.registry import Registry
from mpispeed.monitor import comet_sink, csv_sink, tensorboard_sink, wandb_sink
from mpispeed.monitor.remote import RemoteSinks
from mpispeed.monitor.sink import Sink


@dataclass(frozen=True, slots=True)
class Backend:
    """Constructor of a sink from its section, and what it needs.

    Attributes:
        create: makes the sink in this process.
        module: that it needs.
        is_remote: it belongs into a process of its own if this one is a rank; `create` makes what is not sent.
    """

    create: Callable[[Mapping[str, Any]], Sink]
    module: str | None = None
    is_remote: bool = False


SINKS: Registry[Backend] = Registry("monitor")
SINKS.register("csv_monitor")(Backend(csv_sink.CsvSink.from_section))
SINKS.register("tensorboard")(Backend(tensorboard_sink.TensorBoardSink.from_section, module="tensorboard"))
SINKS.register("wandb")(Backend(lambda s: wandb_sink.WandbSink(s, _folder(s)), module="wandb", is_remote=True))
SINKS.register("comet")(Backend(lambda s: comet_sink.CometSink(s, _folder(s)), module="comet_ml", is_remote=True))


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
    sinks = [backends[name].create(section) for name, section in enabled.items() if not backends[name].is_remote]
    remote = {name: section for name, section in enabled.items() if backends[name].is_remote}
    return [*sinks, RemoteSinks(remote)] if remote else sinks


def write_here(name: str, section: Mapping[str, Any], folder: Path) -> Sink:
    """The sink of a section in this process, into a folder: for programs that are no ranks. Nothing is sent.

    Args:
        name: of the section: csv_monitor, tensorboard, wandb (a folder for `wandb sync`), comet (an archive for
            `comet upload`); WANDB_DIR and COMET_OFFLINE_DIRECTORY come before `folder`.
        section: its settings; those left out are the defaults.
        folder: where to write.

    Raises:
        ConfigError: there is no such sink.
        NativeMissing: the library that it writes with is not installed.
    """
    return _checked(name).create({"output_path": str(folder), "job_name": "", **section})


def _folder(section: Mapping[str, Any]) -> Path:
    return Path(section.get("output_path") or "")


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
