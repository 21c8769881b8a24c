"""The points of a run at which a feature may act, and what it is given there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpispeed.engine.step import Place
from mpispeed.sharding.master_edits import edit_masters

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.base.events import Bus
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.step import StepPart
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.params import ParamStore
    from mpispeed.sharding.update_windows import StateStore


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions of one feature in one run; those left out cost nothing.

    What begins something is called in the order of the table, what ends it (`after_step`, `after_save`) in reverse.

    Attributes:
        step_parts: parts of a step with their places; each is called with the step's context, on every rank.
        batch: called as `batch(inputs, is_training)` with all inputs of a forward pass (a pair of positional and
            keyword arguments; for a pipeline the batch that a stage loaded); returns them, changed or not.
        chunk: called with the inputs of each chunk of a pipeline before it runs, on every stage; it may return a
            function that is called with the outputs.
        before_backward: called by `engine.backward(loss)` with the loss, before it is divided by accumulation steps and
            its gradients are computed; its graph has to stay. Not called by pipelines, nor by `loss.backward()`.
        global_batch: called before a pipeline trains a global batch, on every rank, before stages load data. Others
            learn of training passes by `batch`.
        begun: called as `begun(engine)` at the end of `initialize`; errors are not agreed on. Collective over: all
            ranks.
        after_step: called at the end of `engine.step()`, or of a pipeline's `train_batch`, on every rank. It may end
            the program by an exception that all ranks raise.
        between_steps: called by `engine.heed_requests()` and before evaluations of a pipeline. Collective over: all
            ranks.
        state: returns state for checkpoints, as plain values; that of rank 0 is written.
        check: raises if `load` could not take a state; called before anything of a checkpoint is loaded.
        load: takes it back; not called for checkpoints that have none.
        slots: called as `slots(updates)` with the number of updates that were applied; returns tensors of the run as it
            is then, sharded as the optimizer's states, which checkpoints keep as those; None if it has none then.
        before_save: called before a checkpoint begins. Collective over: all ranks.
        after_save: called when a save is over, whether it succeeded or not. Collective over: all ranks.
        published: objects for scripts and for later features, by name; `engine.NAME` unless the engine or the model has
            an attribute of that name.
    """

    step_parts: Sequence[tuple[Place, StepPart]] = ()
    batch: Callable[[Any, bool], Any] | None = None
    chunk: Callable[[Any], Callable[[Any], None] | None] | None = None
    before_backward: Callable[[torch.Tensor], None] | None = None
    global_batch: Callable[[], None] | None = None
    begun: Callable[[Any], None] | None = None
    after_step: Callable[[], None] | None = None
    between_steps: Callable[[], None] | None = None
    state: Callable[[], Mapping[str, Any]] | None = None
    check: Callable[[Mapping[str, Any]], None] | None = None
    load: Callable[[Mapping[str, Any]], None] | None = None
    slots: Callable[[int], StateStore | None] | None = None
    before_save: Callable[[], None] | None = None
    after_save: Callable[[], None] | None = None
    published: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Given:
    """Arguments of `initialize` beside the model and what trains it.

    Attributes:
        training_data: a data set, or None.
        collate_fn: makes a batch of a list of samples; None: torch's.
        mpu: the groups of ranks of a model that slices its layers itself, or None.
        warnings: what is to be said about the config.
        has_optimizer: False: the engine only evaluates.
    """

    training_data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    mpu: Any = None
    warnings: Sequence[str] = ()
    has_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """A run before its engine is built.

    Attributes:
        settings: the feature's section of the config; None if it has none.
        plan: the plan of the run, with all settings as `plan.config`.
        mesh: the ranks as named axes.
        given: what the script gave to `initialize`.
    """

    settings: Any
    plan: Plan
    mesh: Mesh
    given: Given


@dataclass(frozen=True, slots=True)
class Context(Setup):
    """The run that a feature is attached to.

    Attributes:
        parts: all components of the engine; what has no name here may be another tomorrow.
        published: what the features before this one have published, by name.
    """

    parts: Any  # a Parts, which is made of what is below this module
    published: Mapping[str, Any]

    @property
    def module(self) -> nn.Module:
        """The model."""
        found: nn.Module = self.parts.module
        return found

    @property
    def params(self) -> ParamStore:
        """The store of parameters and masters."""
        found: ParamStore = self.parts.params
        return found

    @property
    def counters(self) -> Counters:
        """Steps, samples and skipped steps."""
        found: Counters = self.parts.counters
        return found

    @property
    def bus(self) -> Bus:
        """Events of the run; listeners watch and change nothing. CLOSE comes also if the engine cannot be built."""
        found: Bus = self.parts.bus
        return found

    def write(self, series: str, value: float) -> None:
        """Write a point of a series to all monitors of the config, over samples. Local; rank 0 writes."""
        self.published["monitor"].write_events([(series, value, self.counters.global_samples)])

    def edit_masters(self, edit: Callable[[str, torch.Tensor], None]) -> None:
        """Change weights in place: call `edit(name, values)` for this rank's ranges of all trained parameters.

        For parts at `Place.UPDATED`. `values` is flat, in the dtype of masters, and part of one parameter; where
        masters are replicated each rank has to make the same change.

        Collective over: all ranks if states are in swap files; else local.

        Raises:
            StoreError: on every rank, if a swap file of one cannot be read or written.
        """
        edit_masters(self.params.shards, edit)
