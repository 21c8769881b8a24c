"""Progressive layer drop of a run: its schedule, the layers that take part, and the units that a pass does not need."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.step import Place
from mpispeed.nn.block import TransformerLayer
from mpispeed.nn.layer_drop.decisions import LayerDrop, number_layers
from mpispeed.nn.layer_drop.layers import find_droppable, make_droppable, take_part
from mpispeed.nn.layer_drop.schedule import ProgressiveLayerDrop
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.base.passes import Pass
    from mpispeed.engine.backward import Counters
    from mpispeed.engine.step import StepContext
    from mpispeed.nn.layer_drop.decisions import Depth
    from mpispeed.sharding.module_hooks import ModuleHooks
    from mpispeed.store.layout import Table

log = logging.getLogger(__name__)

THETA_SERIES, LAYERS_SERIES = "Train/Samples/pld_theta", "Train/Samples/pld_layers_kept"
_KEYWORDS = ("progressive_layer_drop", "pld_theta")


def transform(model: nn.Module, setup: Setup) -> None:
    """Let transformer layers of ours take part."""
    if setup.settings.enabled:
        for module in list(model.modules()):
            if isinstance(module, TransformerLayer):
                make_droppable(module)


def attach(context: Context) -> Hooks:
    """Begin with all layers.

    Collective over: the pipe axis.

    Raises:
        ConfigError: a pipeline has no layer that can be left out.
    """
    section = context.settings
    if not section.enabled:
        return Hooks(published={"progressive_layer_drop": None})
    schedule = ProgressiveLayerDrop(section.theta, section.gamma)
    found = find_droppable(context.module)
    depths = number_layers(name for names in context.mesh["pipe"].gather_objects(list(found)) for name in names)
    layers = {module: depths[name] for name, module in found.items()}
    hands = _hands_keywords(context, has_layers=bool(depths))
    drop = LayerDrop(schedule, context.parts.passes, section.seed)
    run = Run(drop, layers, depths, context)
    if section.theta == 1 and context.mesh.rank == 0:
        log.warning("progressive_layer_drop.theta is 1, with which no layer is left out; the paper takes 0.5")
    if layers:
        context.parts.passes.is_watched = True
        context.parts.passes.listeners.append(run.begin)
        end = take_part(layers, drop)
        context.bus.subscribe(Event.CLOSE, lambda _: end())
    context.bus.subscribe(Event.STEP_END, run.tell)

    def batch(inputs: Any, is_training: bool) -> Any:
        args, kwargs = inputs
        return (args, {**kwargs, **schedule.get_state()}) if is_training else inputs

    return Hooks(
        [(Place.START, UpdateTheta(schedule, context.counters))],
        batch=batch if hands else None,
        state=lambda: {"theta": schedule.get_theta()},
        check=lambda state: _check(state, schedule),
        load=lambda state: setattr(schedule, "current_theta", float(state["theta"])),
        published={"progressive_layer_drop": schedule},
    )


def _hands_keywords(context: Context, *, has_layers: bool) -> bool:
    """True if the model is called with the keywords: it names them, or there is nobody else to leave layers out.

    Raises:
        ConfigError: neither is possible.
    """
    cure = "convert its repeated blocks before initialize: mpispeed.nn.layer_drop.convert_to_layer_drop(model, Block)"
    if isinstance(context.module, PipelineModule):
        if not has_layers:
            msg = f"progressive_layer_drop: the pipeline has no layer that can be left out; {cure}"
            raise ConfigError(msg)
        return False
    takes = inspect.signature(context.module.forward).parameters
    if all(key in takes for key in _KEYWORDS):
        return True
    if has_layers:
        return False
    if context.mesh.rank == 0:
        names = ", ".join(_KEYWORDS)
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values()):
            then = f"takes any keyword and names neither of {names}; if it does not look for them, no layer is left out"
        else:
            then = f"does not take {names}, with which training passes call it: they will end in a TypeError"
        model = type(context.module).__name__
        log.warning("progressive_layer_drop: forward of the model, a %s, %s; %s", model, then, cure)
    return True


def _check(state: Mapping[str, Any], schedule: ProgressiveLayerDrop) -> None:
    if not isinstance(state.get("theta"), float | int) or not 0 <= state["theta"] <= 1:
        msg = f"theta is {state.get('theta')!r}; expected a number from 0 to 1"
        raise ConfigError(msg)


class UpdateTheta:
    """Part of a step that takes the schedule to it."""

    def __init__(self, schedule: ProgressiveLayerDrop, counters: Counters) -> None:
        self._schedule, self._counters = schedule, counters

    def __call__(self, ctx: StepContext) -> None:
        """Local."""
        self._schedule.update_state(self._counters.global_steps)


class Run:
    """Consequences of the decisions outside of the layers: units that are not needed, and points of series."""

    def __init__(
        self, drop: LayerDrop, layers: Mapping[nn.Module, Depth], depths: Mapping[str, Depth], context: Context
    ) -> None:
        self._drop, self._depths, self._context = drop, list(depths.values()), context
        self._hooks: ModuleHooks | None = context.parts.sharding.module_hooks
        self._units = units_of(context.params.table, context.module, layers)
        self._kept = self._decided = 0

    def begin(self, begun: Pass) -> None:
        """Note what a forward pass leaves out. Local."""
        out = {depth.number for depth in self._depths if not self._drop.is_kept(depth, begun)}
        if begun.is_training:
            self._decided += len(self._depths)
            self._kept += len(self._depths) - len(out)
        absent = frozenset(unit for unit, users in self._units.items() if users <= out)
        if self._hooks is not None:
            self._hooks.expect_without(absent)
        if self._context.parts.optimization is not None:
            self._context.parts.optimization.grads.absent = absent

    def tell(self, _: Mapping[str, Any]) -> None:
        """Write the points of a step to the monitors. Local."""
        self._context.write(THETA_SERIES, self._drop.schedule.get_theta())
        if self._decided:
            self._context.write(LAYERS_SERIES, self._kept / self._decided)
        self._kept = self._decided = 0


def units_of(table: Table, model: nn.Module, layers: Mapping[nn.Module, Depth]) -> dict[int, frozenset[int]]:
    """The units that only layers of these use, with the numbers of these layers."""
    users: dict[int, set[int]] = {}  # parameter -> layers
    within: set[nn.Module] = set()
    for layer, depth in layers.items():
        within.update(layer.modules())
        for param in layer.parameters():
            users.setdefault(id(param), set()).add(depth.number)
    for module in model.modules():
        for param in module.parameters(recurse=False) if module not in within else ():
            users.pop(id(param), None)  # tied to one that always runs
    found: dict[int, frozenset[int]] = {}
    for unit in table.all_units:
        if all(id(param) in users for param in unit.params):
            found[unit.index] = frozenset().union(*(users[id(param)] for param in unit.params))
    return found
