"""The row `data_loader`: the loader of `training_data`, whose position is state, and what steps wait for data."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from mpispeed.base.events import Event
from mpispeed.data.node_copies import copy_to_nodes
from mpispeed.data.stalls import StallWatch, Waits
from mpispeed.engine.build.loaders import make_loader
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.rank_numbers import period
from mpispeed.engine.sampling import write_difficulties
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    import torch

    from mpispeed.config.loader import DataLoader
    from mpispeed.data.loader import ShardedLoader

log = logging.getLogger(__name__)

WAIT_MS = "Train/Samples/data_wait_ms"
"""Series: how long the rank that waited longest has waited for the data of a step."""
WINDOW = 50
"""Steps that are looked at together, for a warning."""


def attach(context: Context) -> Hooks:
    """Make the loader of `training_data`, if there is any, and look for stalls by it and by those of `deepspeed_io`.

    Collective over: all ranks, where samples are chosen by difficulty, or files are copied.

    Raises:
        ConfigError: sizes do not fit, it is no data set, samples of it cannot be chosen, or its files not be copied.
    """
    given, counters, waits = context.given, context.counters, Waits()
    if context.parts.optimization is not None:
        stalls = Stalls(context, waits)
        context.parts.updates.send_along(stalls)
        context.bus.subscribe(Event.STEP_END, stalls.on_step)
    dataset = _near(context)
    # DeepSpeed's pipelines read in order, its other engines do not.
    shuffles, sampling = not isinstance(context.module, PipelineModule), context.published.get("data_sampling")

    def make() -> ShardedLoader | None:
        if dataset is None:
            return None
        how: dict[str, Any] = {"shuffles": shuffles, "sampling": sampling, "waits": waits}
        return make_loader(context.plan, context.mesh, dataset, given.collate_fn, **how)

    loader = make() if sampling is None else sampling.begin(context.mesh.world.comm, make)
    if loader is None:
        return Hooks(published={"data_waits": waits})
    write_difficulties(context, loader)
    context.bus.subscribe(Event.CLOSE, lambda _: loader.close())
    return Hooks(
        # Micro-batches since the last boundary have changed only gradients, which are not saved: replay them.
        state=lambda: loader.state_dict(unused_batches=counters.pending_backwards),
        check=loader.check_state,
        load=loader.load_state_dict,
        published={"training_dataloader": loader, "data_waits": waits},
    )


def _near(context: Context) -> Any:
    """The training data, over copies on the node's disk if there are to be any. Collective over: all ranks."""
    dataset, folder, world = context.given.training_data, context.settings.copy_to, context.mesh.world
    if folder is None:
        return dataset
    opened, copies = copy_to_nodes(dataset, folder, world.node, world.comm)
    context.bus.subscribe(Event.CLOSE, lambda _: copies.close())
    return opened


class Stalls:
    """Tells rank 0 how long each rank has waited for the data of a step; rank 0 warns, and writes a series.

    The numbers of all ranks are gathered after the norm: after every step, or rarely with many ranks (`period`).
    """

    def __init__(self, context: Context, waits: Waits) -> None:
        settings: DataLoader = context.settings
        self._context, self._waits = context, waits
        self._every, self._steps = period(1, context.mesh.size), 0
        self._watch = StallWatch(settings.stall_warning, WINDOW) if settings.stall_warning else None
        self._last = time.perf_counter()
        self._found: torch.Tensor | None = None

    def is_wanted(self) -> bool:
        """True once a loader of this rank is used, if somebody looks at the numbers."""
        return self._waits.is_used and (self._watch is not None or self._context.published["monitor"].enabled)

    def give(self) -> Sequence[float]:
        """As `SentNumbers.give`: seconds of waiting, and all, since it gave the last."""
        self._steps += 1
        if self._steps % self._every:
            return ()
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return self._waits.take(), seconds

    def take(self, table: torch.Tensor) -> None:
        """As `SentNumbers.take`."""
        self._found = table

    def on_step(self, event: Mapping[str, Any]) -> None:
        """Look at the numbers of a step that has ended. Local."""
        table, self._found = self._found, None
        if table is None or self._context.mesh.rank or not self._waits.is_used:
            return
        if self._context.published["monitor"].enabled:
            self._context.write(WAIT_MS, 1000 * float(table[:, 0].max()) / self._every)
        if self._watch is None:
            return
        stall = self._watch.add(event["global_step"], table)
        if stall is not None:
            log.warning("%s; %s", stall, self._advice())

    def _advice(self) -> str:
        settings: DataLoader = self._context.settings
        if not settings.workers and not settings.prefetch:
            return "data_loader.prefetch reads batches ahead, data_loader.workers in processes of their own"
        return "more data_loader.workers read more at once, data_loader.copy_to copies files to the disks of the nodes"
