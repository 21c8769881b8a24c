"""Layers of experts in a run: their ranks, and the biases of their routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.step import Place
from mpispeed.nn.expert import ExpertModules, FusedExperts, RoutedExperts, Router
from mpispeed.plan.placements import distinct_factor
from mpispeed.plan.units import distinct_sizes

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.step import StepContext
    from mpispeed.mesh.comm import Comm
    from mpispeed.mesh.mesh import Mesh


def transform(model: nn.Module, setup: Setup) -> None:
    """Share experts out over `ep_size` neighbours on the data axis, as `share_out`."""
    share_out(model, setup.mesh)


def share_out(model: nn.Module, mesh: Mesh) -> None:
    """Give each layer of experts its group of `ep_size` neighbours on the data axis; ranks keep their own experts.

    Raises:
        ConfigError: names the layer that cannot be shared out, and the reason.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts) and layer.ep_size > 1:
            group = mesh[distinct_factor(layer.ep_size).name]
            problem = _problem(layer, group)
            if problem:
                msg = f"layer {name} shares its experts out over ep_size = {layer.ep_size} ranks: {problem}"
                raise ConfigError(msg)
            if layer.comm is None:
                layer.set_expert_group(group)


def _problem(layer: RoutedExperts, group: Comm) -> str:
    """The reason why an engine cannot train a layer whose experts are shared out over `group`, or ""."""
    experts = layer.experts
    if layer.comm is not None and list(layer.comm.ranks) != list(group.ranks):
        return (
            f"its group has the ranks {list(layer.comm.ranks)}, and engines take neighbours on the data axis, here "
            f"{list(group.ranks)}; leave the group to initialize"
        )
    if experts.num_experts % layer.ep_size:
        return f"they do not divide the {experts.num_experts} experts, as engines need it; choose a divisor"
    if not isinstance(experts, ExpertModules | FusedExperts):
        return f"{type(experts).__name__} is neither ExpertModules nor FusedExperts; derive it from one of them"
    if any(True for _ in experts.buffers()):
        return "its experts have buffers, which engines keep equal on all data ranks; use experts without buffers"
    return ""


def attach(context: Context) -> Hooks | None:
    """Balance loads by the biases of routers that have one; let groups go when the engine ends. Local."""
    groups = {id(context.mesh[distinct_factor(size).name]) for size in distinct_sizes(context.module)}
    layers = [each for each in context.module.modules() if isinstance(each, RoutedExperts) and id(each.comm) in groups]

    def leave(_: Any) -> None:
        for layer in layers:
            layer.leave_expert_group()

    context.bus.subscribe(Event.CLOSE, leave)
    routers = [each for each in context.module.modules() if isinstance(each, Router) and each.bias is not None]
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
