"""The table of features: what is attached to a run beside training itself, built in or registered by a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import CheckpointError, ConfigError, UsageError
from mpispeed.config import added
from mpispeed.engine import drills
from mpispeed.engine.hooks import Context, Hooks

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.config.section import Section
    from mpispeed.engine.step import Place, StepPart
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the table.

    Attributes:
        name: unique; the key of its section in the config and of its state in checkpoints.
        attach: called once for each engine, on every rank; returns None where the feature is off.
        section: its settings; None if it has none.
        transform: changes the model, called as `transform(model, settings, plan, mesh)` before parameters are sharded.
    """

    name: str
    attach: Callable[[Context], Hooks | None]
    section: type[Section] | None = None
    transform: Callable[[nn.Module, Any, Plan, Mesh], None] | None = None


BUILT_IN = (Feature("drills", drills.attach),)
"""Features that are always in the table, before those of scripts."""

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
        UsageError: there is no such feature.
    """
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


def transform(model: nn.Module, plan: Plan, mesh: Mesh) -> None:
    """Let features change the model, before its parameters are sharded.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if a feature fails on one.
    """
    for feature in registered():
        if feature.transform is not None:
            with mesh.world.comm.together(ConfigError, plain=Exception):
                feature.transform(model, _settings(feature, plan), plan, mesh)


def _settings(feature: Feature, plan: Plan) -> Any:
    return None if feature.section is None else getattr(plan.config, feature.name, feature.section())


class Attached:
    """The features of one engine that are on."""

    def __init__(self) -> None:
        """None are on yet; `batches` are the functions that change inputs of the model."""
        self._hooks: dict[str, Hooks] = {}
        self.batches: list[Callable[[Any, bool], Any]] = []

    def attach(self, context: Context) -> list[tuple[Place, StepPart]]:
        """Attach the rows of the table to a run; returns their parts of a step.

        Collective over: all ranks.

        Raises:
            ConfigError: on every rank, if a feature fails on one.
        """
        for feature in registered():
            with context.mesh.world.comm.together(ConfigError, plain=Exception):
                hooks = feature.attach(replace(context, settings=_settings(feature, context.plan)))
            if hooks is not None:
                self._hooks[feature.name] = hooks
        self.batches = [hooks.batch for hooks in self._hooks.values() if hooks.batch is not None]
        return [row for hooks in self._hooks.values() for row in hooks.step_parts]

    def batch(self, inputs: Any, *, is_training: bool) -> Any:
        """The inputs of a forward pass, as features change them."""
        for change in self.batches:
            inputs = change(inputs, is_training)
        return inputs

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, by name."""
        return {name: dict(hooks.state()) for name, hooks in self._hooks.items() if hooks.state is not None}

    def load(self, states: Mapping[str, Any]) -> None:
        """Give state of a checkpoint back; features without state there stay as they are.

        Raises:
            CheckpointError: a feature does not take its state.
        """
        for name, hooks in self._hooks.items():
            if hooks.load is not None and name in states:
                try:
                    hooks.load(states[name])
                except Exception as error:
                    msg = f"feature {name!r} does not take its state in this checkpoint: {error}"
                    raise CheckpointError(msg) from error

    def before_save(self) -> None:
        """Tell features that a save begins. Collective over: all ranks."""
        for hooks in self._hooks.values():
            if hooks.before_save is not None:
                hooks.before_save()

    def after_save(self) -> None:
        """Tell features that a save is over. Collective over: all ranks."""
        for hooks in self._hooks.values():
            if hooks.after_save is not None:
                hooks.after_save()
