"""Features of one run: what a row of the table is, the transforms of a model, and the hooks of those that are on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import CheckpointError, ConfigError
from mpispeed.engine.agreement import configuring
from mpispeed.engine.hooks import Context, Hooks, Setup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from mpispeed.config.section import Section
    from mpispeed.engine.step import Place, StepPart
    from mpispeed.plan.plan import Plan
    from mpispeed.sharding.update_windows import StateStore


def off(context: Context) -> None:
    """For features that only transform the model."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    Attributes:
        name: unique; the key of its section in the config and of its state in checkpoints.
        attach: called once for each engine, on every rank; returns None where the feature is off.
        section: its settings; None if it has none.
        transform: changes the model, called as `transform(model, setup)` before parameters are sharded. It may
            communicate.
        is_of_data: its state is a place in the data, which `load_checkpoint(load_data_state=False)` leaves alone.
    """

    name: str
    attach: Callable[[Context], Hooks | None] = off
    section: type[Section] | None = None
    transform: Callable[[nn.Module, Setup], None] | None = None
    is_of_data: bool = False


def transform(rows: Iterable[Feature], model: nn.Module, setup: Setup) -> None:
    """Let features change the model, before its parameters are sharded.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a feature fails on one.
    """
    for feature in rows:
        if feature.transform is not None:
            with configuring(setup.mesh.world.comm):
                feature.transform(model, replace(setup, settings=_settings(feature, setup.plan)))


def _settings(feature: Feature, plan: Plan) -> Any:
    return None if feature.section is None else getattr(plan.config, feature.name, feature.section())


class Attached:
    """The features of one engine that are on.

    Attributes:
        published: the objects that they offer, by name.
        batches: functions that change inputs of the model.
        chunks: functions of the inputs of a chunk of a pipeline.
        before_backwards: functions of a loss before its backward pass.
        global_batches: functions before a global batch of a pipeline.
        after_steps: functions at the end of a step, in their order.
        between_steps: functions between steps.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Feature, Hooks]] = {}
        self.published: dict[str, Any] = {}
        self.batches: list[Callable[[Any, bool], Any]] = []
        self.chunks: list[Callable[[Any], Callable[[Any], None] | None]] = []
        self.before_backwards: list[Callable[[torch.Tensor], None]] = []
        self.global_batches: list[Callable[[], None]] = []
        self.after_steps: list[Callable[[], None]] = []
        self.between_steps: list[Callable[[], None]] = []

    def attach(self, rows: Iterable[Feature], context: Context) -> list[tuple[Place, StepPart]]:
        """Attach rows of the table to a run; returns their parts of a step.

        Collective over: all ranks.

        Raises:
            ConfigError: on every rank, if a feature fails on one.
        """
        for feature in rows:
            with configuring(context.mesh.world.comm):
                settings, published = _settings(feature, context.plan), dict(self.published)
                hooks = feature.attach(replace(context, settings=settings, published=published))
                if hooks is not None:
                    self._add(feature, hooks)
        found = [hooks for _, hooks in self._rows.values()]
        self.batches = [hooks.batch for hooks in found if hooks.batch is not None]
        self.chunks = [hooks.chunk for hooks in found if hooks.chunk is not None]
        self.before_backwards = [hooks.before_backward for hooks in found if hooks.before_backward is not None]
        self.global_batches = [hooks.global_batch for hooks in found if hooks.global_batch is not None]
        self.after_steps = [hooks.after_step for hooks in reversed(found) if hooks.after_step is not None]
        self.between_steps = [hooks.between_steps for hooks in found if hooks.between_steps is not None]
        return [row for hooks in found for row in hooks.step_parts]

    def _add(self, feature: Feature, hooks: Hooks) -> None:
        taken = sorted(self.published.keys() & (hooks.published or {}).keys())
        if taken:
            msg = f"feature {feature.name!r} publishes {', '.join(taken)}, as one before it does; choose another name"
            raise ConfigError(msg)
        self._rows[feature.name] = feature, hooks
        self.published.update(hooks.published or {})

    def begun(self, engine: Any) -> None:
        """Tell features that their engine is complete. Collective over: all ranks."""
        for _, hooks in self._rows.values():
            if hooks.begun is not None:
                hooks.begun(engine)

    def batch(self, inputs: Any, *, is_training: bool) -> Any:
        """The inputs of a forward pass, as features change them."""
        for change in self.batches:
            inputs = change(inputs, is_training)
        return inputs

    def before_backward(self, loss: torch.Tensor) -> None:
        """Show features a loss before its backward pass."""
        for look in self.before_backwards:
            look(loss)

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, by name."""
        return {name: dict(hooks.state()) for name, (_, hooks) in self._rows.items() if hooks.state is not None}

    def check(self, states: Mapping[str, Any], *, takes_data: bool) -> None:
        """Raise if `load` could not take these states; changes nothing.

        Raises:
            CheckpointError: a feature would not take its state.
        """
        for name, hooks in self._of(states, takes_data=takes_data):
            if hooks.check is not None:
                _give(hooks.check, name, states)

    def load(self, states: Mapping[str, Any], *, takes_data: bool) -> None:
        """Give state of a checkpoint back; features without state there stay as they are.

        Args:
            states: by name.
            takes_data: give also the state of those whose state is a place in the data.

        Raises:
            CheckpointError: a feature does not take its state.
        """
        for name, hooks in self._of(states, takes_data=takes_data):
            if hooks.load is not None:
                _give(hooks.load, name, states)

    def slots(self, updates: int) -> list[StateStore]:
        """Tensors of features beside the optimizer's states, of a run in which so many updates were applied."""
        asked = [hooks.slots(updates) for _, hooks in self._rows.values() if hooks.slots is not None]
        return [store for store in asked if store is not None]

    def _of(self, states: Mapping[str, Any], *, takes_data: bool) -> list[tuple[str, Hooks]]:
        rows = [row for row in self._rows.values() if takes_data or not row[0].is_of_data]
        return [(feature.name, hooks) for feature, hooks in rows if feature.name in states]

    def before_save(self) -> None:
        """Tell features that a save begins. Collective over: all ranks."""
        for _, hooks in self._rows.values():
            if hooks.before_save is not None:
                hooks.before_save()

    def after_save(self) -> None:
        """Tell features that a save is over. Collective over: all ranks."""
        for _, hooks in reversed(self._rows.values()):
            if hooks.after_save is not None:
                hooks.after_save()


def _give(take: Callable[[Mapping[str, Any]], None], name: str, states: Mapping[str, Any]) -> None:
    try:
        take(states[name])
    except Exception as error:
        msg = f"feature {name!r} does not take its state in this checkpoint: {error}"
        raise CheckpointError(msg) from error
