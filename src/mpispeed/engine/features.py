"""The table of features: what is attached to a run beside training itself, built in or registered by a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.config import added
from mpispeed.config.walltime import Walltime
from mpispeed.engine import drills, preemption
from mpispeed.engine.agreement import configuring
from mpispeed.engine.build import loaders, slicing
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.observe import reports

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.section import Section
    from mpispeed.engine.step import Place, StepPart
    from mpispeed.mesh.comm import Comm
    from mpispeed.plan.plan import Plan


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


BUILT_IN = (
    Feature("slicing", slicing.attach, transform=slicing.fit_layers),
    Feature("monitors", reports.attach),
    Feature("loader", loaders.attach, is_of_data=True),
    Feature("drills", drills.attach),
    Feature("walltime", preemption.attach, section=Walltime),
)
"""Features that are always in the table, before those of scripts.

Order has a meaning: a row sees the model as the rows before it have left it, and what they have published. Slices come
first, so that others add whole layers to a model that is sliced; monitors come before what may write to them. What ends
something runs in reverse: `walltime` may end the program after a step when the features of scripts are done with it.
"""

_table: dict[str, Feature] = {feature.name: feature for feature in BUILT_IN}


def register(feature: Feature) -> Feature:
    """Enter a feature into the table, for engines that are made from now on; call it on all ranks alike.

    Raises:
        UsageError: the name is taken, or the section cannot be added to the settings.
    """
    if feature.name in _table:
        msg = f"a feature named {feature.name!r} is registered already; unregister it first, or choose another name"
        raise UsageError(msg)
    if feature.section is not None:
        added.add_section(feature.name, feature.section)
    _table[feature.name] = feature
    return feature


def unregister(name: str) -> None:
    """Take a feature out of the table; engines that have it keep it.

    Raises:
        UsageError: there is no such feature, or it is one of `BUILT_IN`.
    """
    if any(feature.name == name for feature in BUILT_IN):
        msg = f"feature {name!r} belongs to mpispeed and stays; its section in the config switches it off"
        raise UsageError(msg)
    feature = _table.pop(name, None)
    if feature is None:
        msg = f"no feature named {name!r} is registered; registered: {', '.join(_table) or 'none'}"
        raise UsageError(msg)
    if feature.section is not None:
        added.remove_section(name)


def registered() -> tuple[Feature, ...]:
    """All rows of the table, in the order of their registration."""
    return tuple(_table.values())


def require_same(comm: Comm) -> None:
    """Refuse tables that differ between ranks.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank.
    """
    found = comm.gather_objects(list(_table))
    odd = next((rank for rank, names in enumerate(found) if names != found[0]), None)
    if odd is not None:
        told = [", ".join(names) or "none" for names in (found[0], found[odd])]
        msg = f"rank {odd} has registered the features {told[1]}, and rank 0 {told[0]}; register the same on all ranks"
        raise ConfigError(msg)


def transform(model: nn.Module, setup: Setup) -> None:
    """Let features change the model, before its parameters are sharded.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a feature fails on one.
    """
    for feature in registered():
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
        after_steps: functions at the end of a step, in their order.
        between_steps: functions between steps.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Feature, Hooks]] = {}
        self.published: dict[str, Any] = {}
        self.batches: list[Callable[[Any, bool], Any]] = []
        self.after_steps: list[Callable[[], None]] = []
        self.between_steps: list[Callable[[], None]] = []

    def attach(self, context: Context) -> list[tuple[Place, StepPart]]:
        """Attach the rows of the table to a run; returns their parts of a step.

        Collective over: all ranks.

        Raises:
            ConfigError: on every rank, if a feature fails on one.
        """
        for feature in registered():
            with configuring(context.mesh.world.comm):
                settings, published = _settings(feature, context.plan), dict(self.published)
                hooks = feature.attach(replace(context, settings=settings, published=published))
                if hooks is not None:
                    self._add(feature, hooks)
        found = [hooks for _, hooks in self._rows.values()]
        self.batches = [hooks.batch for hooks in found if hooks.batch is not None]
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
