"""The row `reproducibility`: with `reduction` "invariant" the bits of a run do not depend on the number of ranks.

It attaches the random numbers and the losses of slots, fixes the threads, and keeps what bits depend on besides in
checkpoints, so that a run that goes on under other conditions is told.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.base.version import VERSION
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.slot_losses import SlotLosses
from mpispeed.engine.slot_streams import SlotStreams
from mpispeed.engine.step import Place
from mpispeed.mesh.world import library
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpispeed.config.reproducibility import Reproducibility
    from mpispeed.engine.build.parts import Parts
    from mpispeed.engine.step import StepContext
    from mpispeed.plan.slots import Slots

log = logging.getLogger(__name__)

_RUN = ("slots", "micro_batch", "seed")
"""Conditions that make another run: the others change bits by a rounding."""


def attach(context: Context) -> Hooks | None:
    """Make a run of slots one whose bits do not depend on the ranks; None for other reductions.

    Collective over: all ranks.
    """
    parts, plan = context.parts, context.plan
    if plan.slots is None:
        return None
    settings: Reproducibility = context.settings
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    context.bus.subscribe(Event.CLOSE, lambda _: torch.set_num_threads(before))
    stages = context.mesh.index("pipe"), context.mesh["pipe"].size

    def slots() -> Slots | None:
        return parts.plan.slots

    streams = parts.streams = SlotStreams(plan.config.seed, slots, context.mesh, context.module, stages)
    context.bus.subscribe(Event.CLOSE, lambda _: streams.leave())
    if parts.optimization is not None and not isinstance(context.module, PipelineModule):
        parts.updates.slot_losses = SlotLosses(slots, context.mesh.topology)
        parts.updates.send_along(parts.updates.slot_losses)
    conditions = Conditions(context, settings.threads)
    return Hooks(
        [(Place.START, _Leave(streams))],
        state=conditions.state,
        check=conditions.check,
        load=conditions.load,
        before_save=streams.leave,
    )


class _Leave:
    """Part of a step before all others: no slot is open then, also if none of its passes was followed by a backward."""

    def __init__(self, streams: SlotStreams) -> None:
        self._streams = streams

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._streams.leave()


class Conditions:
    """Conditions of equal bits beside config, data and model: threads, processor, versions."""

    def __init__(self, context: Context, threads: int) -> None:
        """Compare those of all ranks. Collective over: all ranks."""
        self._parts: Parts = context.parts
        self._is_first = context.mesh.rank == 0
        self._machine = {"cpu": cpu_type(), "threads": str(threads), **versions()}
        everyone = context.mesh.world.comm.gather_objects(self._machine)
        odd = next((rank for rank, each in enumerate(everyone) if each != everyone[0]), None)
        if odd is not None and self._is_first:
            told = _told(everyone[0], everyone[odd], "rank 0", f"rank {odd}")
            log.warning('reduction "invariant": bits may depend on the ranks here, because %s', told)

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        batch, slots = self._parts.plan.batch, self._parts.plan.slots
        count = 0 if slots is None else slots.count
        run = {"slots": count, "micro_batch": batch.micro_batch_size, "seed": self._parts.plan.config.seed}
        return {**run, "machine": dict(self._machine)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what is no such state.

        Raises:
            ConfigError: a value is missing.
        """
        missing = [name for name in (*_RUN, "machine") if name not in state]
        if missing:
            msg = f"the conditions of the run lack {', '.join(missing)}"
            raise ConfigError(msg)

    def load(self, state: Mapping[str, Any]) -> None:
        """Say in what a saved run differs. Local, on rank 0."""
        if not self._is_first:
            return
        own = self.state()
        other = {name: str(state[name]) for name in _RUN if state[name] != own[name]}
        if other:
            now = {name: str(own[name]) for name in other}
            log.warning(
                'reduction "invariant": this is another run than the one that was saved, and other bits come of it: %s',
                _told(other, now, "the checkpoint", "this run"),
            )
        saved = {str(name): str(value) for name, value in dict(state["machine"]).items()}
        if saved != self._machine:
            log.warning(
                'reduction "invariant": bits may part from those of the run that was saved, because %s',
                _told(saved, self._machine, "the checkpoint", "this run"),
            )


def _told(first: Mapping[str, str], second: Mapping[str, str], one: str, other: str) -> str:
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    parts = (f"{name} is {first.get(name, 'unknown')!r} and {second.get(name, 'unknown')!r}" for name in names)
    return f"{one} and {other} differ: {'; '.join(parts)}"


def cpu_type() -> str:
    """The type of the processor, and the instructions that torch uses of it."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return f"{next(found, name)}, {torch.backends.cpu.get_cpu_capability()}"


def versions() -> dict[str, str]:
    """Versions of the libraries that compute or add."""
    shown = torch.__config__.show().splitlines()
    blas = next((line.strip("- ,") for line in shown if "Math Kernel Library" in line or "OpenBLAS" in line), "")
    return {
        "mpispeed": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "blas": blas or "unknown",
        "mpi": library() or "none",
    }
