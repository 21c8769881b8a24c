"""The points of a run at which a feature may act, and what it is given there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpispeed.engine.step import Place
from mpispeed.sharding.update_windows import edit_masters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.step import StepPart
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.monitor.by_hand import Monitors
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.params import ParamStore


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of one feature in one run; those left out cost nothing.

    Attributes:
        step_parts: parts of a step with their places; each is called with the step's context, on every rank.
        batch: called as `batch(inputs, is_training)` with all inputs of a forward pass (a pair of positional and
            keyword arguments; for a pipeline the batch that a stage loaded); returns them, changed or not.
        state: returns state for checkpoints, as plain values; that of rank 0 is written.
        load: takes it back; not called for checkpoints that have none.
        before_save: called before a checkpoint begins. Collective over: all ranks.
        after_save: called when a save is over, whether it succeeded or not. Collective over: all ranks.
    """

    step_parts: Sequence[tuple[Place, StepPart]] = ()
    batch: Callable[[Any, bool], Any] | None = None
    state: Callable[[], Mapping[str, Any]] | None = None
    load: Callable[[Mapping[str, Any]], None] | None = None
    before_save: Callable[[], None] | None = None
    after_save: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """The run that a feature is attached to.

    Attributes:
        settings: the feature's section of the config; None if it has none.
        plan: the plan of the run, with all settings as `plan.config`.
        mesh: the ranks as named axes.
        module: the model.
        params: the store of parameters and masters.
        counters: steps, samples and skipped steps.
        bus: events of the run; listeners watch and change nothing.
        monitors: the monitors of the config.
    """

    settings: Any
    plan: Plan
    mesh: Mesh
    module: nn.Module
    params: ParamStore
    counters: Counters
    bus: Bus
    monitors: Monitors

    def write(self, series: str, value: float) -> None:
        """Write a point of a series to all monitors of the config, over samples. Local; rank 0 writes."""
        self.monitors.write_events([(series, value, self.counters.global_samples)])

    def edit_masters(self, edit: Callable[[str, torch.Tensor], None]) -> None:
        """Change weights in place: call `edit(name, values)` for this rank's ranges of all trained parameters.

        For parts at `Place.UPDATED`. `values` is flat, in the dtype of masters, and part of one parameter; where
        masters are replicated each rank has to make the same change.

        Collective over: all ranks if states are in swap files; else local.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read or written.
        """
        edit_masters(self.params.shards, edit)
