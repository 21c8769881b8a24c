"""Layers of experts in a run: what an engine does for them beside training their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpispeed.base.errors import ConfigError
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.step import Place
from mpispeed.nn.expert import RoutedExperts, Router

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.engine.step import StepContext
    from mpispeed.mesh.comm import Comm


def transform(model: nn.Module, setup: Setup) -> None:
    """Refuse experts that are shared out over ranks.

    Raises:
        ConfigError: names the layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts) and layer.ep_size > 1:
            msg = f"layer {name} shares its experts out over ep_size = {layer.ep_size} ranks, which an engine cannot "
            msg += "train yet; set ep_size to 1, and all ranks have all experts, cut by ZeRO as other parameters"
            raise ConfigError(msg)


def attach(context: Context) -> Hooks | None:
    """Balance loads by the biases of routers that have one. Local."""
    routers = [each for each in context.module.modules() if isinstance(each, Router) and each.bias is not None]
    if not routers:
        return None
    return Hooks([(Place.PUBLISHED, MoveBiases(routers, context.mesh["data"]))])


class MoveBiases:
    """Part of a step that moves the biases of routers, once for each update that is applied."""

    def __init__(self, routers: list[Router], comm: Comm) -> None:
        self._routers, self._comm = routers, comm

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis."""
        if not ctx.skip:
            for router in self._routers:
                router.update_bias(self._comm)
