"""Loads of experts: summed over the ranks once in a step, for the biases of routers, monitors and the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.step import Place
from mpispeed.nn.expert import RoutedExperts, Router

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.engine.step import StepContext

log = logging.getLogger(__name__)


def attach(context: Context) -> Hooks | None:
    """Count loads in the routers of the model, where a bias, a monitor or the log is to know them.

    Collective over: the pipeline stages.
    """
    routers = named_routers(context.module)
    stages: list[list[tuple[str, int]]] = context.mesh["pipe"].gather_objects(
        [(name, router.num_experts) for name, router in routers.items()]
    )
    every = 1 if context.published["monitor"].enabled else context.plan.steps_per_print or 0
    if not any(stages) or not (every or any(router.options.bias_rate for router in routers.values())):
        return None
    loads = SumLoads(list(routers.values()), stages, context, every)
    if context.mesh.rank == 0:
        context.bus.subscribe(Event.STEP_END, loads.tell)
    return Hooks([(Place.PUBLISHED, loads)])


def named_routers(model: nn.Module) -> dict[str, Router]:
    """Routers by the name of their layer of experts, or by their own if they have none."""
    names = {layer.gate: name for name, layer in model.named_modules() if isinstance(layer, RoutedExperts)}
    found = ((names.get(each, name), each) for name, each in model.named_modules() if isinstance(each, Router))
    return {name or "model": router for name, router in found}


class SumLoads:
    """Part of a step that sums loads over ranks, and moves the biases of routers by them if the update is applied."""

    def __init__(
        self, routers: list[Router], stages: list[list[tuple[str, int]]], context: Context, every: int
    ) -> None:
        """Count from now on.

        Args:
            routers: of this pipeline stage.
            stages: names and numbers of experts of the layers of all stages.
            context: the run.
            every: steps from report to report; 0: none.
        """
        self._routers, self._context, self._every = routers, context, every
        self._stages, self._found = stages, dict[str, torch.Tensor]()
        self._has_bias = any(router.options.bias_rate for router in routers)
        for router in routers:
            router.keeps_load = bool(router.options.bias_rate) or every > 0

    def __call__(self, ctx: StepContext) -> None:
        """Collective over: the data axis for biases; together with the pipeline stages for a report."""
        own = [router.take_load() for router in self._routers]
        step = self._context.counters.global_steps + 1
        if self._every and step % self._every == 0:
            own = self._report(own)
        elif self._has_bias:
            own = self._summed(own, ("data",))
        if not ctx.skip and self._has_bias:
            for router, load in zip(self._routers, own, strict=True):
                router.move_bias(load[0])

    def _report(self, own: list[torch.Tensor]) -> list[torch.Tensor]:
        """Sum the loads of all layers in one message, and keep them for `tell`; returns those of this stage."""
        layers, place = [layer for each in self._stages for layer in each], self._context.mesh["pipe"].rank
        loads = [torch.zeros(2, experts, dtype=torch.int64) for _, experts in layers]
        start = sum(map(len, self._stages[:place]))
        loads[start : start + len(own)] = own
        loads = self._summed(loads, ("pipe", "data"))
        self._found = {name: load for (name, _), load in zip(layers, loads, strict=True)}
        return loads[start : start + len(own)]

    def _summed(self, loads: list[torch.Tensor], axes: tuple[str, ...]) -> list[torch.Tensor]:
        """Collective over: the axes."""
        flat = torch.cat([load.reshape(-1) for load in loads])
        self._context.mesh[axes].all_reduce(flat)
        return [part.view(2, -1) for part in flat.split([load.numel() for load in loads])]

    def tell(self, event: Mapping[str, Any]) -> None:
        """Announce and log what was found in this step. Local, on rank 0."""
        found, self._found = self._found, {}
        if not found:
            return
        step, every = event["global_step"], self._context.plan.steps_per_print
        self._context.bus.announce(Event.EXPERT_LOADS, global_step=step, samples=event["samples"], layers=found)
        if every and step % every == 0:
            log.info("experts | %s", summary(found))


def summary(layers: Mapping[str, torch.Tensor]) -> str:
    """The busiest expert of all layers, and the choices that were dropped, in words."""
    highest = {name: float(load[0].max() / load[0].double().mean().clamp(min=1e-9)) for name, load in layers.items()}
    name = max(highest, key=lambda name: highest[name])
    chosen, dropped = torch.stack([load.sum(1) for load in layers.values()]).sum(0).tolist()
    text = f"busiest: expert {int(layers[name][0].argmax())} of {name}, {highest[name]:.2f} x the mean"
    return f"{text}; dropped {dropped} of {chosen} choices" if dropped else text
