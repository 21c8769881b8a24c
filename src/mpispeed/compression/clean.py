"""`redundancy_clean`: compression becomes permanent; layers get smaller, and weights of up to 8 bits packed codes.

Order: weight quantization, then masks (sparse, row, head, channel), as in training. With related modules rows, heads
and channels are removed, from the layer and from those that follow it; without, they are zeros. Quantized values are
the same before and after: scales are those of the whole weight.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.units import format_bytes, format_list
from mpispeed.compression import torchao_weights
from mpispeed.compression.api import read_section
from mpispeed.compression.last_weights import Cut, last_weight
from mpispeed.compression.packed_layers import pack_weight, packed_weight
from mpispeed.compression.student import unwrapped
from mpispeed.engine.agreement import configuring
from mpispeed.engine.engine import Engine
from mpispeed.mesh.world import current
from mpispeed.nn.compression.layers import LayerState, Progress, drop_masks, make_compressible, make_plain, mask_of
from mpispeed.nn.compression.masks import spread
from mpispeed.nn.compression.matching import form_of, is_conv1d, out_dim_of
from mpispeed.nn.compression.model import compress, compression_of, forget
from mpispeed.nn.compression.slices import Slices
from mpispeed.nn.compression.techniques import ACTIVATIONS, PRUNINGS, WEIGHTS, Group, Pruning, read_groups
from mpispeed.sharding.sharded_param import is_sharded

if TYPE_CHECKING:
    from mpispeed.nn.compression.model import Compression

log = logging.getLogger(__name__)

_NAMES_SHOWN = 5

_HEADS = frozenset({"num_attention_heads", "num_key_value_heads", "num_heads", "n_heads", "n_head", "nhead", "heads"})
_HEAD_WIDTHS = frozenset({"all_head_size", "inner_dim"})
"""Attributes of a module of attention that count heads, and the columns of all heads."""


def redundancy_clean(
    model: nn.Module,
    deepspeed_config: str | Path | Mapping[str, Any],
    mpu: Any = None,
    form: Literal["packed", "torchao"] = "packed",
) -> nn.Module:
    """Make the compression of a model permanent, in place; returns the plain model.

    Weights get their target bits and masks their last state, whatever the schedule says. Up to 8 bits they become
    packed codes, see `packed_layers`; more bits, and what codes cannot hold (such as zeros where zero is no value of an
    asymmetric quantizer), stay parameters with the quantized values. Quantization of activations stays as it is.

    With related modules rows, heads and channels go, and the attributes of layers with them; modules of attention above
    the layers get their new number of heads. Of several layers that feed one, what any of them loses goes from all.
    What lies between a layer and those that follow it has to work on each element alone (GELU, dropout), or be a batch
    norm that is named as related.

    Args:
        model: that `init_compression` or `initialize` compressed, or a new one into which `load_state_dict` put the
            state of such a model; or an engine, which ends here: every rank then has the whole model (of its stage, and
            with its experts).
        deepspeed_config: the settings of the run: a dict, or the path of a JSON file.
        mpu: not needed.
        form: of weights of up to 8 bits: packed codes, or, for linear layers where each row has one scale, tensors of
            torchao, with a byte for each code.

    Collective over: all ranks, if `model` is an engine.

    Raises:
        ConfigError: the settings are not those of the model, or a layer that should get smaller cannot.
        UsageError: the model is sliced, its parameters are still sharded or on meta, or torchao is missing.
    """
    if form == "torchao":
        torchao_weights.require()
    groups = read_groups(read_section(deepspeed_config))
    was_engine = isinstance(model, Engine)
    if isinstance(model, Engine):
        model = _out_of(model, groups)
    inner = unwrapped(model)
    _require_full(inner)
    world = current()
    with nullcontext() if world is None or not was_engine else configuring(world.comm):
        compression = compress(inner, groups)
    cleaning = _Cleaning(inner, compression, form)
    _tell_early(cleaning.early(), compression.progress.step, is_shared=was_engine)
    cleaning.run()
    log.info("%s", cleaning)
    return model


def _require_full(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if Slices.of(layer) is not None:
            msg = (
                f"redundancy_clean: {name} is sliced over ranks; save a checkpoint, and load its weights into an "
                "unsliced model that init_compression made, or use mpispeed ckpt export --quantized"
            )
            raise UsageError(msg)


def _out_of(engine: Engine, groups: list[Group]) -> nn.Module:
    """The model of an engine with its whole parameters; the engine ends, unless the model cannot be cleaned.

    Collective over: all ranks.
    """
    comm = engine.mesh.world.comm
    with comm.together(UsageError):
        _require_full(engine.module)
    with configuring(comm):
        if compression_of(engine.module) is not None:
            compress(engine.module, groups)  # the settings are the same
    if engine.mpispeed.parts.params.away:
        engine.reload_states()
    engine.destroy()
    return engine.module


def _tell_early(early: list[str], step: int, *, is_shared: bool) -> None:
    """Warn of techniques that are not in their last state by the schedule, once.

    Args:
        early: layers with their techniques.
        step: updates that were counted.
        is_shared: other ranks may have other layers, as the stages of a pipeline.

    Collective over: all ranks, if `is_shared`.
    """
    world = current()
    if is_shared and world is not None:
        early = list(dict.fromkeys(each for rank in world.comm.gather_objects(early) for each in rank))
    if early and (world is None or world.rank == 0):
        names = format_list(early, _NAMES_SHOWN)
        no_steps = "" if step else " (no step was counted here; load_state_dict does not say how many were made)"
        log.warning("redundancy_clean: not in its last state in training yet: %s%s", names, no_steps)


@dataclass
class _Plan:
    """The future of one layer.

    Attributes:
        keep_out, keep_in: [outputs], [inputs]: what stays; None: all.
        zeros: masks in shapes that multiply the weight.
        zero_rows: [outputs]: masks of the bias.
    """

    layer: nn.Module
    state: LayerState
    keep_out: Tensor | None = None
    keep_in: Tensor | None = None
    zeros: list[Tensor] = field(default_factory=list)
    zero_rows: list[Tensor] = field(default_factory=list)

    def keep(self, side: str, mask: Tensor) -> None:
        """Let only these outputs ("out") or inputs ("in") stay."""
        name = f"keep_{side}"
        known = getattr(self, name)
        setattr(self, name, mask if known is None else known & mask)

    def cut(self, dims: int) -> Cut:
        """What goes of a weight of so many dims."""
        out = out_dim_of(self.layer)
        masks = {out: self.keep_out, 1 - out: self.keep_in}
        return Cut(self.zeros, {dim: mask for dim, mask in masks.items() if mask is not None and dim < dims})


class _Cleaning:
    """The cleaning of one model.

    Attributes:
        packed: how many weights became codes.
        shrunk: how many layers have fewer rows or columns.

    Units:
        bytes_before, bytes_after: of weights and biases of all layers, as they are held.
    """

    def __init__(self, model: nn.Module, compression: Compression, form: str) -> None:
        modules = dict(model.named_modules())
        self._model, self._modules, self._form = model, modules, form
        states = dict(compression.layers)
        for state in compression.layers.values():
            for name in (name for names in state.related.values() for name in names):
                states.setdefault(name, LayerState(name, Progress()))  # shrinks only
        self._plans = {name: _Plan(modules[name], state) for name, state in states.items()}
        self.packed = self.shrunk = self.bytes_before = self.bytes_after = 0

    def __str__(self) -> str:
        before, after = format_bytes(self.bytes_before), format_bytes(self.bytes_after)
        return (
            f"redundancy_clean: {len(self._plans)} layers, {self.packed} with packed weights, {self.shrunk} with fewer "
            f"rows or columns; {before} became {after}"
        )

    @torch.no_grad()
    def run(self) -> None:
        """Clean all layers."""
        self._check()
        for name, plan in self._plans.items():  # masks first: scores are of whole weights
            for kind in PRUNINGS.values():
                pruning = plan.state.pruning(kind)
                if pruning is not None:
                    self._mask(name, plan, pruning)
        for name, plan in self._plans.items():
            self._join(name, plan)
        for plan in self._plans.values():
            self._finish(plan)
        forget(self._model)

    def _check(self) -> None:
        for name, plan in self._plans.items():
            if any(
                param is not None and (param.is_meta or is_sharded(param)) for param in plan.layer._parameters.values()
            ):
                msg = f"redundancy_clean: {name} has no values on this rank; pass the engine, which gathers them"
                raise UsageError(msg)

    def early(self) -> list[str]:
        """Layers with the techniques that are not in their last state by the schedule."""
        return [
            f"{name} ({method})"
            for name, plan in self._plans.items()
            for method, technique in plan.state.techniques.items()
            if method not in plan.state.active
            or (method == WEIGHTS and (plan.state.mixed or plan.state.bits != cast("Any", technique).target_bits))
        ]

    def _mask(self, name: str, plan: _Plan, pruning: Pruning) -> None:
        """Plan what a mask takes from a layer and those that follow it."""
        kind, weight = pruning.kind, cast("Tensor", plan.layer._parameters["weight"])
        mask = mask_of(plan.layer, kind).detach() != 0
        related = plan.state.related.get(pruning.method, ())
        if kind == "sparse" or not related:
            plan.zeros.append(spread(kind, mask, weight, out_dim_of(plan.layer)))
            if kind in ("row", "channel"):
                plan.zero_rows.append(mask.view(-1))
            return
        if kind == "head":
            columns = mask.view(-1, 1).expand(-1, weight.shape[1 - out_dim_of(plan.layer)] // mask.numel()).reshape(-1)
            plan.keep("in", columns)
            for other in related:
                self._plans[other].keep("out", columns)
            self._count_heads(related, mask, columns)
            return
        plan.keep("out", mask.view(-1))
        for other in related:
            is_norm = form_of(self._plans[other].layer) == "norm"
            self._plans[other].keep("out" if is_norm else "in", mask.view(-1))

    def _join(self, name: str, plan: _Plan) -> None:
        """Let a layer lose what others do that feed the same layer, which gets none of it in training, either."""
        for method in ("row_pruning", "channel_pruning"):
            others = [self._plans[other] for other in plan.state.related.get(method, ())]
            norms = [other for other in others if form_of(other.layer) == "norm"]
            for consumer in (other for other in others if form_of(other.layer) != "norm"):
                taken = cast("Tensor", consumer.keep_in)
                for each in (plan, *norms):
                    each.keep("out", taken)
                if not torch.equal(taken, cast("Tensor", plan.keep_out)):
                    msg = (
                        f"redundancy_clean: layers that follow {name} lose different inputs, since other layers feed "
                        "some of them, too; name the same related modules for all of these"
                    )
                    raise ConfigError(msg)

    def _count_heads(self, related: tuple[str, ...], mask: Tensor, columns: Tensor) -> None:
        """Tell the modules of attention above these layers how many heads are left."""
        for name in {other.rpartition(".")[0] for other in related}:
            own = self._modules[name].__dict__
            for names, kept in ((_HEADS, mask), (_HEAD_WIDTHS, columns)):
                for attribute in names & own.keys():
                    if own[attribute] == kept.numel():
                        own[attribute] = int(kept.sum())

    def _finish(self, plan: _Plan) -> None:
        """Give a layer its last weight and bias, and its sizes."""
        layer, state = plan.layer, plan.state
        self.bytes_before += _held_bytes(layer)
        for name, value in _other_values(plan).items():
            old = layer._parameters.get(name)
            if old is None:
                layer._buffers[name] = value
            elif value is not old:
                layer._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
        weight = layer._parameters.get("weight")
        packed = values = None
        if weight is not None:
            technique = state.weight_quantization
            bits = 0 if technique is None else technique.target_bits
            packed, values = last_weight(weight, bits, state.quantizer, plan.cut(weight.dim()))
        _strip(layer, state)
        if weight is not None and values is not None and values is not weight:
            layer._parameters["weight"] = nn.Parameter(values, requires_grad=weight.requires_grad)
        if plan.keep_in is not None or plan.keep_out is not None:
            _resize(plan)
            self.shrunk += 1
        if packed is not None and weight is not None:
            made = None
            if self._form == "torchao" and isinstance(layer, nn.Linear):
                made = torchao_weights.as_torchao(packed, weight.dtype)
            if made is None:
                pack_weight(layer, packed)
            else:
                layer._parameters["weight"] = nn.Parameter(made, requires_grad=False)
            self.packed += 1
        self.bytes_after += _held_bytes(layer)


def _held_bytes(layer: nn.Module) -> int:
    own = {name: layer._parameters.get(name) for name in ("weight", "bias")}
    packed = packed_weight(layer)
    return sum(value.nbytes for value in own.values() if value is not None) + (0 if packed is None else packed.nbytes)


def _other_values(plan: _Plan) -> dict[str, Any]:
    """The bias, and of a normalisation its statistics."""
    found: dict[str, Any] = {}
    for name in ("bias", "running_mean", "running_var"):
        value = plan.layer._parameters.get(name, plan.layer._buffers.get(name))
        if value is None:
            continue
        for mask in plan.zero_rows if name == "bias" else ():
            value = value * mask
        found[name] = value if plan.keep_out is None else value[plan.keep_out]
    return found


def _strip(layer: nn.Module, state: LayerState) -> None:
    """Take all of compression from a layer but the quantization of its input."""
    activation = state.techniques.get(ACTIVATIONS)
    if activation is None:
        make_plain(layer)
        return
    drop_masks(layer)
    make_compressible(layer, LayerState(state.name, Progress(), {ACTIVATIONS: activation}, active={ACTIVATIONS}))


def _resize(plan: _Plan) -> None:
    """Set the attributes for the sizes of a layer."""
    names = {"conv": ("in_channels", "out_channels"), "norm": ("num_features", "num_features")}
    linear = ("nx", "nf") if is_conv1d(plan.layer) else ("in_features", "out_features")
    for name, mask in zip(names.get(str(form_of(plan.layer)), linear), (plan.keep_in, plan.keep_out), strict=True):
        if mask is not None:
            setattr(plan.layer, name, int(mask.sum()))
