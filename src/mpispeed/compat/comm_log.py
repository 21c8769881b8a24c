"""The comms logger and the trace of communication, for user code."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mpispeed.base.errors import UsageError
from mpispeed.compat.comm_groups import current_world
from mpispeed.mesh import comms_log

if TYPE_CHECKING:
    from mpispeed.mesh.collectives.group import CommTrace

log = logging.getLogger("mpispeed.comm")

_COMMS_KEYS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")


def comm_trace() -> CommTrace:
    """The trace of this process's communication: counts, bytes and seconds per verb and axes."""
    return current_world().comm_trace


def configure(
    deepspeed_config: object = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Sequence[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the comms logger; all ranks have to pass the same.

    Args:
        deepspeed_config: a dict with the section `comms_logger`, or an object with that attribute; the others override.
        enabled: record from now on.
        prof_all: all verbs.
        prof_ops: these verbs, if not all.
        verbose: log each call at once, on rank 0.
        debug: keep separate rows for each caller.
    """
    comm_trace, comms = current_world().comm_trace, comms_log.of_process()
    section = _comms_section(deepspeed_config)
    comms.configure(section, enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug)
    comms.detach()  # its settings of the trace may have changed
    comms.attach(comm_trace)


def start_profiling_comms() -> None:
    """Let the comms logger record all verbs."""
    comms_log.of_process().configure(prof_all=True)


def stop_profiling_comms() -> None:
    """Let the comms logger record only the verbs selected by name."""
    comms_log.of_process().configure(prof_all=False)


def start_profiling_op(op_name_list: Sequence[str]) -> None:
    """Let the comms logger record these verbs too."""
    comms_log.of_process().profile(op_name_list, is_on=True)


def stop_profiling_op(op_name_list: Sequence[str]) -> None:
    """Let the comms logger record these verbs no longer, unless it records all."""
    comms_log.of_process().profile(op_name_list, is_on=False)


def log_summary(show_straggler: bool = False) -> None:
    """Log on rank 0 the records of the comms logger; if it is off, the counts of the trace.

    With `show_straggler` a second table has the time rank 0 waited for others, and the rank that came last.

    Collective over: all ranks of the job.
    """
    world, comms = current_world(), comms_log.of_process()
    if not any(world.comm.transport.library_gather_objects(comms.is_attached or bool(comms.rows()))):
        log.info("communication of rank %d\n%s", world.rank, world.comm_trace.summary())
        return
    world.comm.transport.library_barrier()
    log.info("communication of rank %d\n%s", world.rank, comms.table())
    if show_straggler:
        log.info("waits of rank %d for other ranks\n%s", world.rank, comms.straggler_table(world.comm))
    world.comm.transport.library_barrier()


def _comms_section(config: object) -> Mapping[str, object]:
    """The section `comms_logger` of a dict, or of an object that has it."""
    found = config.get("comms_logger") if isinstance(config, Mapping) else getattr(config, "comms_logger", None)
    if found is None:
        return {}
    values = found if isinstance(found, Mapping) else {name: getattr(found, name) for name in _COMMS_KEYS}
    unknown = sorted(set(values) - set(_COMMS_KEYS))
    if unknown:
        msg = f"comms_logger: unknown key {unknown[0]!r}; its keys are {', '.join(_COMMS_KEYS)}"
        raise UsageError(msg)
    return values
