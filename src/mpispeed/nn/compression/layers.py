"""Layers whose weights are compressed while they run: their class is replaced by one with its own forward.

Nothing else about a layer changes: not its name, its parameters, its other attributes or what `isinstance` says. For
the time of its forward `weight` and `bias` are the compressed values, computed from the parameters when it begins, when
sharded parameters are gathered. Outside of it `weight` is the parameter.
"""

from __future__ import annotations

import math
import sys
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mpispeed.base.stand_ins import stand_in
from mpispeed.native.token_choice import key_of
from mpispeed.nn.compression.masks import (
    Kind,
    columns_of,
    initial_scores,
    kept_count,
    l1_scores,
    mask_shape,
    spread,
    top_k_mask,
)
from mpispeed.nn.compression.matching import form_of, out_dim_of
from mpispeed.nn.compression.quantizers import Quantizer, copied_gradient, fake_quantize, quantize_between
from mpispeed.nn.compression.slices import (
    SlicedWeight,
    Slices,
    along_bias,
    along_input,
    comm_of_input,
    put,
    shared_range,
)
from mpispeed.nn.compression.techniques import (
    ACTIVATIONS,
    PRUNINGS,
    WEIGHTS,
    ActivationQuantization,
    Pruning,
    Technique,
    WeightQuantization,
)
from mpispeed.nn.tensor.linear import CutLayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpispeed.base.passes import Pass, Passes

RANGE = "activation_range"
"""Buffer [2], fp32: least and greatest input of training; [inf, -inf] before the first."""

MOMENTUM = 0.95
"""Of a running range: what stays of it at each training pass."""

_STATE = "_compression_state"
_classes: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(eq=False)
class Progress:
    """The place where training is; all layers of a model share it.

    Attributes:
        step: updates that were made.
        seed: of stochastic rounding and of first scores.
        passes: the pass that runs, if an engine says it.
    """

    step: int = 0
    seed: int = 0
    passes: Passes | None = None

    @property
    def current(self) -> Pass | None:
        """The pass that runs, or whose backward runs."""
        return None if self.passes is None else self.passes.current

    def follow(self, passes: Passes) -> None:
        """Take part in the passes of an engine from now on."""
        passes.is_watched = True
        passes.listeners.append(_shielding)
        self.passes = passes

    def leave(self) -> None:
        """Take part in them no longer."""
        if self.passes is not None:
            self.passes.listeners.remove(_shielding)
            self.passes = None

    def key(self, name: str) -> int:
        """A number for this place, pass and layer, also when backward runs a pass again; the same on all ranks.

        Of a pass that is a slot it is that of the slot.
        """
        current = self.current
        step, micro = (self.step, 0) if current is None else (current.global_step, current.micro_step)
        if current is not None and current.slot is not None:
            micro = current.slot
        return key_of(self.seed, step, micro, zlib.crc32(name.encode()))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles belong to no engine."""
        return {"step": self.step, "seed": self.seed, "passes": None}


@dataclass(eq=False)
class LayerState:
    """The techniques of one layer, and what is active.

    Attributes:
        name: of the layer in its model.
        progress: where training is.
        techniques: section of the config -> what it asks for.
        related: section -> names of the layers that shrink along.
        active: sections that are active now.
        bits: of the weight now.
        mixed: part of the plain weight that is mixed into the quantized one, from 1 to 0.
        quantizer: of the weight; its groups are those of this layer.
        has_mask: sections whose fixed masks are in their buffers.
        follows: layers whose rows or channels are inputs of this one.
        kept_outputs: the mask of rows or channels of the last forward.
    """

    name: str
    progress: Progress
    techniques: dict[str, Technique] = field(default_factory=dict)
    related: dict[str, tuple[str, ...]] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    bits: int = 0
    mixed: float = 0.0
    quantizer: Quantizer = field(default_factory=Quantizer)
    has_mask: set[str] = field(default_factory=set)
    follows: list[LayerState] = field(default_factory=list)
    kept_outputs: Tensor | None = None
    _values: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _ranges: dict[Pass, Tensor] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to passes."""
        return {**self.__dict__, "_values": {}, "_ranges": {}, "kept_outputs": None}

    @property
    def weight_quantization(self) -> WeightQuantization | None:
        """That of the weight, if there is any."""
        return cast("WeightQuantization | None", self.techniques.get(WEIGHTS))

    def set_step(self, step: int) -> None:
        """Switch on what begins at this step or before; the rest is off. Local."""
        self.active = {name for name, technique in self.techniques.items() if step >= technique.offset}
        self.kept_outputs = None
        self._ranges.clear()

    def pruning(self, kind: str) -> Pruning | None:
        """The pruning of a kind, if there is any."""
        return cast("Pruning | None", self.techniques.get(f"{kind}_pruning"))


def make_compressible(layer: nn.Module, state: LayerState) -> None:
    """Let one layer compute with what `state` says; a layer that does so already gets the new state."""
    known = type(layer)
    if known not in _classes.values():
        layer.__class__ = _class_of(known)
    layer.__dict__[_STATE] = state


def make_plain(layer: nn.Module) -> None:
    """Give a layer its own class back; scores, masks and ranges go. No effect on others."""
    plain = plain_class(type(layer))
    if plain is type(layer):
        return
    layer.__class__ = plain
    layer.__dict__.pop(_STATE, None)
    layer._buffers.pop(RANGE, None)
    drop_masks(layer)


def drop_masks(layer: nn.Module) -> None:
    """Take the masks and scores of all kinds of pruning from a layer."""
    for name in (f"{kind}_{what}" for kind in PRUNINGS.values() for what in ("mask", "scores")):
        layer._buffers.pop(name, None)
        layer._parameters.pop(name, None)


def plain_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a layer had before it was compressible; others are what they are."""
    return next((base for base, known in _classes.items() if known is kind), kind)


def state_of(layer: nn.Module) -> LayerState | None:
    """What a layer computes with; None for other modules."""
    return cast("LayerState | None", layer.__dict__.get(_STATE))


def add_technique(layer: nn.Module, technique: Technique, weight_shape: tuple[int, ...]) -> None:
    """Give a compressible layer one more technique, with its buffers and parameters.

    Args:
        layer: with a state.
        technique: one whose method it lacks.
        weight_shape: that of the full weight, which may be sharded now.
    """
    state = _known(layer)
    state.techniques[technique.method] = technique
    weight = cast("Tensor", layer._parameters["weight"])
    if isinstance(technique, WeightQuantization):
        state.bits = technique.target_bits if technique.in_forward else technique.start_bits
        rows = weight_shape[0] if form_of(layer) == "embedding" else technique.quantizer.groups
        state.quantizer = replace(technique.quantizer, groups=rows)
        state.mixed = 0.0
    elif isinstance(technique, ActivationQuantization):
        if technique.is_static:
            layer.register_buffer(RANGE, torch.tensor([torch.inf, -torch.inf], device=weight.device))
    else:
        kind = technique.kind
        shape = mask_shape(kind, weight_shape, out_dim_of(layer), technique.num_heads)
        if technique.is_learned:
            key = key_of(state.progress.seed, zlib.crc32(f"{state.name}.{kind}_scores".encode()))
            scores = initial_scores(shape, key, weight.dtype, weight.device)
            put(layer, f"{kind}_scores", nn.Parameter(scores))
        else:
            put(layer, f"{kind}_mask", torch.ones(shape, dtype=torch.bool, device=weight.device))


def _known(layer: nn.Module) -> LayerState:
    return cast("LayerState", layer.__dict__[_STATE])


def _class_of(base: type[nn.Module]) -> type[nn.Module]:
    """The compressible class for layers of a class; there is one."""
    if base not in _classes:
        _classes[base] = _compressible(base)
    return _classes[base]


def _compressible(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name that computes with compressed values."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _Steps.run(self, base.forward, args, kwargs)

    names = {"forward": forward, "plain_type": base, "carry_to": _carry_to}
    return stand_in(base, names | {name: _value(name) for name in ("weight", "bias")}, _rebuilt)


def _carry_to(self: nn.Module, made: nn.Module) -> None:
    """As `nn.tensor.carried.Carries`."""
    make_compressible(made, _known(self))
    for name, part in [*self._parameters.items(), *self._buffers.items()]:
        if name not in ("weight", "bias") and part is not None:
            put(made, name, part)


def _value(name: str) -> property:
    """The compressed value within forward, else the parameter."""

    def get(self: nn.Module) -> Any:
        values = _known(self)._values
        if name in values:
            return values[name]
        return nn.Module.__getattr__(self, name)

    return property(get)


def _rebuilt(base: type[nn.Module]) -> nn.Module:
    """An empty layer, for copies and pickles."""
    layer: nn.Module = base.__new__(base)
    layer.__class__ = _class_of(base)
    return layer


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first one changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, {**kwargs, first: change(kwargs[first])}


# -- values ------------------------------------------------------------------------------------------------------------


def compressed_values(layer: nn.Module) -> dict[str, Tensor]:
    """What `weight` and `bias` of a compressible layer are in its forward: quantized, then masked.

    The parameters have to be whole on this rank.
    """
    state, slices = _known(layer), Slices.of(layer)
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None:
        return {}
    values: Tensor = quantized_weight(layer, weight) if WEIGHTS in state.active else weight
    shift: Tensor | None = bias
    for method, kind in PRUNINGS.items():
        if method in state.active:
            mask = mask_of(layer, kind)
            values = values * spread(kind, mask, weight, out_dim_of(layer), slices)
            if kind in ("row", "channel"):
                state.kept_outputs = mask.detach().view(-1)
                shift = None if shift is None else shift * along_bias(mask.view(-1), layer)
    found = {"weight": values} if values is not weight else {}
    return found if shift is None or shift is bias else {**found, "bias": shift}


def quantized_weight(layer: nn.Module, weight: Tensor) -> Tensor:
    """The weight as its quantizer has it now. Stochastic rounding is for training; else to the nearest."""
    state = _known(layer)
    is_drawn = layer.training and state.quantizer.rounding == "stochastic"
    key = state.progress.key(state.name) if is_drawn else None
    slices = Slices.of(layer)
    grouped = None if slices is None else SlicedWeight(weight, state.quantizer.groups, slices)
    found = fake_quantize(weight, state.bits, state.quantizer, key, grouped)
    if not state.mixed:
        return found
    with torch.no_grad():
        mixture = weight * state.mixed + found * (1 - state.mixed)
    return copied_gradient(weight, mixture)


def mask_of(layer: nn.Module, kind: Kind) -> Tensor:
    """The mask of a kind of pruning that the layer has; of the method l1 it is made when it is first asked for.

    Collective over: the slices of a layer that is cut, if the mask has the shape of the weight or is made now.
    """
    state, slices = _known(layer), Slices.of(layer)
    pruning = cast("Pruning", state.pruning(kind))
    if pruning.is_learned:
        scores = cast("Tensor", layer._parameters[f"{kind}_scores"])
        if kind != "sparse" or slices is None:
            return top_k_mask(scores, pruning.dense_ratio)
        with torch.no_grad():
            mask = slices.own(top_k_mask(slices.whole(scores), pruning.dense_ratio))
        return copied_gradient(scores, mask)
    mask = cast("Tensor", layer._buffers[f"{kind}_mask"])
    if pruning.scores == "l1" and pruning.method not in state.has_mask:
        parts = slices if kind == "sparse" else None
        count, size = (int(mask.sum()), mask.numel()) if parts is None else (parts.count(mask), parts.size)
        if count != kept_count(size, pruning.dense_ratio):  # else it comes from a checkpoint
            weight = cast("Tensor", layer._parameters["weight"]).detach()
            weight = weight if slices is None else slices.whole(weight)
            scores = l1_scores(kind, weight, out_dim_of(layer), pruning.num_heads)
            made = top_k_mask(scores, pruning.dense_ratio)
            mask.copy_(made if parts is None else parts.own(made))
        state.has_mask.add(pruning.method)
    return mask


# -- inputs ------------------------------------------------------------------------------------------------------------


def compressed_input(layer: nn.Module, x: Tensor) -> Tensor:
    """The input, quantized, and without what the layers before lost.

    What follows a pruned row or channel is no zero if there is a normalisation or a sigmoid in between; here it becomes
    one, as it will be once it is removed. Gradients pass, so that scores of what was lost go on learning.
    """
    state = _known(layer)
    if ACTIVATIONS in state.active:
        x = quantized_input(layer, x)
    for kept in _kept_before(layer, state):
        x = copied_gradient(x, x.detach() * (kept.view(-1, 1, 1) if form_of(layer) == "conv" else kept))
    return x


def _kept_before(layer: nn.Module, state: LayerState) -> list[Tensor]:
    """Which of its inputs the layers before have kept, as far as they ran."""
    kept = [source.kept_outputs for source in state.follows if source.kept_outputs is not None]
    return kept if form_of(layer) == "conv" else [along_input(each, layer) for each in kept]


def quantized_input(layer: nn.Module, x: Tensor) -> Tensor:
    """The input as its quantizer has it: by ranges of tokens or images, or by the running range."""
    state = _known(layer)
    technique = cast("ActivationQuantization", state.techniques[ACTIVATIONS])
    if not x.numel() and comm_of_input(layer) is None:
        return x
    if technique.is_static:
        low, high = _running_range(layer, x, state).unbind()
        return quantize_between(x, low, high, technique.bits, technique.quantizer)
    masks = _kept_before(layer, state)
    if "head_pruning" in state.active:
        slices, weight = Slices.of(layer), cast("Tensor", layer._parameters["weight"])
        width = (weight.shape if slices is None else slices.cut.shape)[1 - out_dim_of(layer)]
        masks.append(along_input(columns_of(mask_of(layer, "head").detach(), width), layer))
    if not masks:
        return _quantized_rows(layer, x, technique)
    # Inputs that cleaning removes must not have a part in the ranges.
    dim, kept = -3 if form_of(layer) == "conv" else -1, torch.stack([mask != 0 for mask in masks]).all(0).nonzero()
    return x.index_copy(dim, kept.view(-1), _quantized_rows(layer, x.index_select(dim, kept.view(-1)), technique))


def _quantized_rows(layer: nn.Module, x: Tensor, technique: ActivationQuantization) -> Tensor:
    """Inputs quantized by the ranges of their tokens, or of their images."""
    comm = comm_of_input(layer)
    if comm is not None:
        low, high = shared_range(x, comm, [-1]).unbind()
        return quantize_between(x, low, high, technique.bits, technique.quantizer)
    is_conv = form_of(layer) == "conv"
    groups = (x.shape[0] if x.dim() == 4 else 1) if is_conv else math.prod(x.shape[:-1])
    return fake_quantize(x, technique.bits, replace(technique.quantizer, groups=groups))


def _running_range(layer: nn.Module, x: Tensor, state: LayerState) -> Tensor:
    """The range to quantize with, [2]; a training pass takes part in it once, however often it runs."""
    held = cast("Tensor", layer._buffers[RANGE])
    current = state.progress.current
    if current in state._ranges:
        return state._ranges[current]
    is_first = bool(held[0] > held[1])
    is_again = torch._C._current_graph_task_id() != -1
    if not layer.training or is_again:
        return _range_of(layer, x) if is_first else held
    with torch.no_grad():
        seen = _range_of(layer, x)
        moved = seen if is_first else held * MOMENTUM + seen * (1 - MOMENTUM)
        # An overflow, whose step is skipped, would stay in the range for good.
        held.copy_(torch.where(seen.isfinite().all(), moved, held))
    if current is not None:
        state._ranges[current] = held.clone()
    return held


def _range_of(layer: nn.Module, x: Tensor) -> Tensor:
    """The least and the greatest element of an input, [2]; of all slices, as these may have parts of it."""
    if isinstance(layer, CutLayer) and layer.comm.size > 1:
        return shared_range(x, layer.comm, range(x.dim())).view(2)
    return torch.stack(x.detach().float().aminmax())


def _run(layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of a layer's own `forward` with compressed input, weight and bias."""
    state = _known(layer)
    if not state.active and not state.follows:
        return forward(layer, *args, **kwargs)
    args, kwargs = _with_first(args, kwargs, lambda x: compressed_input(layer, x))
    outer = state._values
    state._values = compressed_values(layer)
    try:
        return forward(layer, *args, **kwargs)
    finally:
        state._values = outer


class _Steps:
    """The function around a layer's own forward; once a compiler is loaded, one that it does not trace.

    It decides by numbers that change at steps, and keeps ranges and masks.
    """

    run = staticmethod(_run)


def shield() -> None:
    """Keep the compiler out of compressible layers, if there is one: it loads slowly. Local."""
    if _Steps.run is _run and "torch._dynamo" in sys.modules:
        _Steps.run = staticmethod(torch.compiler.disable(_run))


def _shielding(_: Pass) -> None:
    """Shield when a pass begins: only then compiled code runs, and a compiler has been loaded."""
    shield()
