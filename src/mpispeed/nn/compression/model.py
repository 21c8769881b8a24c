"""Compression of a model: its layers get their techniques, and become active as steps are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import nn

from mpispeed.base.errors import ConfigError
from mpispeed.nn.compression.layers import LayerState, Progress, add_technique, make_compressible, shield
from mpispeed.nn.compression.matching import Match, check_technique, form_of, match_groups
from mpispeed.nn.compression.slices import Slices
from mpispeed.nn.compression.techniques import Group, Pruning

_MARK = "_compression"
_TAUGHT = "_layer_of_a_teacher"


@dataclass(eq=False)
class Compression:
    """All that is compressed in one model.

    Attributes:
        groups: of the config.
        layers: name of a layer -> its state, in the model's order.
        progress: the step, and the pass that runs.
    """

    groups: list[Group]
    progress: Progress
    layers: dict[str, LayerState] = field(default_factory=dict)

    def set_step(self, step: int) -> None:
        """Say how many updates were made: techniques are active from their offsets on. Local.

        It is a pure function of the step, so it may go back, as after a load. Bits that fall along a schedule are set
        by whoever has the schedule, in `layers`.
        """
        shield()
        if step not in (self.progress.step, self.progress.step + 1):
            self.forget_masks()
        self.progress.step = step
        for state in self.layers.values():
            state.set_step(step)

    def forget_masks(self) -> None:
        """Look at the buffers of fixed masks again, because they were loaded: those of ones are made anew. Local."""
        for state in self.layers.values():
            state.has_mask.clear()


def compress(model: nn.Module, groups: Sequence[Group], seed: int = 0, elsewhere: Collection[str] = ()) -> Compression:
    """Give the layers of a model their techniques, in place. Local: on all ranks alike.

    What is active at step 0 is active now. A second call with equal groups changes nothing.

    Args:
        model: any module; of a pipeline, the layers of this stage.
        groups: of `read_groups`.
        seed: of stochastic rounding and of first scores.
        elsewhere: names of modules that only other stages of a pipeline have.

    Raises:
        ConfigError: the groups do not fit to the model, or it is compressed by others.
    """
    known = compression_of(model)
    if known is not None:
        if known.groups != list(groups):
            msg = "compression: the model is compressed already, by other settings; give the same ones, or a new model"
            raise ConfigError(msg)
        return known
    modules = {name: module for name, module in model.named_modules() if form_of(module) is not None}
    matches = match_groups(modules, groups, elsewhere)
    shapes = {match.name: _full_shape(modules[match.name]) for match in matches}
    for match in matches:
        check_technique(match.name, modules[match.name], match.group, shapes[match.name])
    made = Compression(list(groups), Progress(seed=seed))
    _make_layers(made, modules, matches, shapes)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path in evaluation reads weights past forward
    model.__dict__[_MARK] = made
    made.set_step(0)
    return made


def _make_layers(
    made: Compression, modules: dict[str, nn.Module], matches: Sequence[Match], shapes: dict[str, tuple[int, ...]]
) -> None:
    followers = {name for match in matches for name in _consumers(modules, match)}
    for name, module in modules.items():
        if name in shapes or name in followers:
            made.layers[name] = LayerState(name, made.progress)
            make_compressible(module, made.layers[name])
    for match in matches:
        state, technique = made.layers[match.name], match.group.technique
        add_technique(modules[match.name], technique, shapes[match.name])
        if match.related:
            state.related[technique.method] = match.related
        for name in _consumers(modules, match):
            made.layers[name].follows.append(state)


def _consumers(modules: dict[str, nn.Module], match: Match) -> list[str]:
    """The followers of a match that take its outputs as their inputs."""
    technique = match.group.technique
    if not isinstance(technique, Pruning) or technique.kind not in ("row", "channel"):
        return []
    return [name for name in match.related if form_of(modules[name]) != "norm"]


def compression_of(model: nn.Module) -> Compression | None:
    """What is compressed in a model; None if nothing is."""
    return next((module.__dict__[_MARK] for module in model.modules() if _MARK in module.__dict__), None)


def mark_taught(module: nn.Module) -> None:
    """Remember that a module has its values from a teacher, as `layer_reduction` asks for."""
    module.__dict__[_TAUGHT] = True


def is_taught(model: nn.Module) -> bool:
    """True if a module of the model is so marked."""
    return any(_TAUGHT in module.__dict__ for module in model.modules())


def _full_shape(layer: nn.Module) -> tuple[int, ...]:
    """The shape of a weight, also of one that is sharded now, or cut over slices."""
    slices = Slices.of(layer)
    if slices is not None:
        return slices.cut.shape
    weight = layer._parameters["weight"]
    return () if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))


def forget(model: nn.Module) -> None:
    """Let nothing be known of the compression of a model any more; its layers stay as they are."""
    for module in model.modules():
        module.__dict__.pop(_MARK, None)
