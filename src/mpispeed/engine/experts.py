"""Layers of experts in a run: their ranks, and the biases of their routers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.step import Place
from mpispeed.nn.expert import ExpertModules, FusedExperts, RoutedExperts, Router
from mpispeed.optim.expert_groups import is_moe_param
from mpispeed.plan.placements import distinct_factor

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.step import StepContext
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh


_shared_out: weakref.WeakSet[RoutedExperts] = weakref.WeakSet()
"""Layers whose groups are those of engines."""


def transform(model: nn.Module, setup: Setup) -> None:
    """Share experts out over `ep_size` neighbours on the data axis, as `share_out`."""
    share_out(model, setup.mesh)


def share_out(model: nn.Module, mesh: Mesh) -> None:
    """Give each layer of experts its group of `ep_size` neighbours on the data axis; ranks keep their own experts.

    Raises:
        ConfigError: names the layer that cannot be shared out, and the reason; or experts in other layers.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts) and layer.ep_size > 1:
            group = mesh[distinct_factor(layer.ep_size).name]
            problem = _problem(layer)
            if problem:
                msg = f"layer {name} shares its experts out over ep_size = {layer.ep_size} ranks: {problem}"
                raise ConfigError(msg)
            layer.set_expert_group(group)
            _shared_out.add(layer)
    _refuse_own_kinds(model, mesh["data"].size)


def _refuse_own_kinds(model: nn.Module, ranks: int) -> None:
    """Refuse experts of other layers than `RoutedExperts`, known by DeepSpeed's tags: their values would be made equal.

    Raises:
        ConfigError: names a parameter.
    """
    for name, param in model.named_parameters() if ranks > 1 else ():
        group = getattr(param, "group_name", None)
        if is_moe_param(param) and distinct_over(param) == 1 and group != "ep_size_1":
            msg = f"parameter {name} has allreduce = False and group_name = {group!r}, as experts that differ between "
            msg += (
                "ranks, and is in no mpispeed.moe.MoE or RoutedExperts, so that initialize would give all ranks equal "
                "values; use one of these layers, or remove both attributes"
            )
            raise ConfigError(msg)


def check_groups(model: nn.Module) -> None:
    """Require that scripts have set no groups of layers of experts; drop those of an engine that could not be built.

    Raises:
        ConfigError: names a layer.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, RoutedExperts):
            continue
        if layer.comm is None or layer in _shared_out:
            layer.leave_expert_group()  # copies have none, and numbers still
        elif layer.comm.size > 1:
            msg = f"layer {name} of the model has its group of {layer.comm.size} ranks already, and initialize sets "
            msg += "groups itself: give the layer ep_size, and leave out set_expert_group and set_deepspeed_parallelism"
            raise ConfigError(msg)


def _problem(layer: RoutedExperts) -> str:
    """The reason why an engine cannot train a layer whose experts are shared out, or ""."""
    experts = layer.experts
    if experts.num_experts % layer.ep_size:
        return f"they do not divide the {experts.num_experts} experts, as engines need it; choose a divisor"
    if not isinstance(experts, ExpertModules | FusedExperts):
        return f"{type(experts).__name__} is neither ExpertModules nor FusedExperts; derive it from one of them"
    if any(True for _ in experts.buffers()):
        return "its experts have buffers, which engines keep equal on all data ranks; use experts without buffers"
    return ""


def attach(context: Context) -> Hooks | None:
    """Balance loads by the biases of routers that have one; let groups go when the engine ends. Local."""
    layers = [each for each in context.module.modules() if isinstance(each, RoutedExperts) and each in _shared_out]

    def leave(_: Any) -> None:
        for layer in layers:
            layer.leave_expert_group()

    context.bus.subscribe(Event.CLOSE, leave)
    routers = [each for each in context.module.modules() if isinstance(each, Router) and each.options.bias_rate]
    return Hooks([(Place.PUBLISHED, MoveBiases(routers, context.mesh["data"]))]) if routers else None


class MoveBiases:
    """Part of a step that moves the biases of routers, once for each update that is applied."""

    def __init__(self, routers: list[Router], comm: Comm) -> None:
        self._routers, self._comm = routers, comm

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if not ctx.skip:
            for router in self._routers:
                router.update_bias(self._comm)
