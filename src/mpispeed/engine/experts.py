"""Layers of experts in a run: their ranks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Setup
from mpispeed.nn.expert import ExpertModules, FusedExperts, Levels, RoutedExperts, Router
from mpispeed.optim.expert_groups import is_moe_param
from mpispeed.plan.placements import NEAR, distinct_factor, far
from mpispeed.sharding.init_experts import InitExperts

if TYPE_CHECKING:
    from torch import nn

    from mpispeed.mesh.mesh import Mesh
    from mpispeed.store.layout import Table


_shared_out: weakref.WeakSet[RoutedExperts] = weakref.WeakSet()
"""Layers whose groups are those of engines."""


def transform(model: nn.Module, setup: Setup) -> None:
    """Share experts out over `ep_size` neighbours on the data axis, as `share_out`."""
    share_out(model, setup.mesh)
    for router in model.modules():
        if isinstance(router, Router):
            if router.options.global_balance and setup.plan.slots is not None:
                msg = (
                    'reduction "invariant": a router with global_balance takes the tokens of all ranks into its loss, '
                    "and which micro-batches these have at once depends on their number; leave global_balance out"
                )
                raise ConfigError(msg)
            router.set_balance_group(setup.mesh["data"])


def share_out(model: nn.Module, mesh: Mesh) -> None:
    """Give each layer of experts its group of `ep_size` neighbours on the data axis; ranks keep their own experts.

    Raises:
        ConfigError: names the layer that cannot be shared out, and the reason; or experts in other layers.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedExperts) and layer.ep_size > 1:
            factor = distinct_factor(layer.ep_size)
            problem = _problem(layer)
            if problem:
                msg = f"layer {name} shares its experts out over ep_size = {layer.ep_size} ranks: {problem}"
                raise ConfigError(msg)
            hands = InitExperts(mesh[str(factor.rest)])
            layer.set_expert_group(mesh[factor.name], _levels(mesh, layer.ep_size), hands=hands)
            hands.finish()
            _shared_out.add(layer)
    _refuse_own_kinds(model, mesh["data"].size)


def _levels(mesh: Mesh, ranks: int) -> Levels | None:
    """Inside and between nodes, if groups of `ranks` neighbours fill several nodes with several ranks each."""
    return Levels(mesh[NEAR], mesh[far(ranks)]) if mesh.topology.has(far(ranks)) else None


def require_alike(table: Table, mesh: Mesh) -> None:
    """Require that data ranks have their parameters in units of the same kinds and lengths, one by one.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank; some ranks train other experts than others do, or in other groups.
    """
    own = [(unit.is_trainable, unit.kind, unit.layout.padded, unit.layout.reckoned) for unit in table.all_units]
    everyone = mesh["data"].gather_objects(own)
    odd = [rank for rank, units in enumerate(everyone) if units != everyone[0]]
    problem = (
        f"data ranks {odd[:8]} have experts in other units than data rank 0: freeze experts (requires_grad) and divide "
        "them into parameter groups alike at the same places of all ranks, or all experts of a layer alike"
    )
    mesh.world.comm.agree(not odd, problem, ConfigError)


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
    if layer.ep_size > experts.num_experts:
        return (
            f"some would have none of the {experts.num_experts} experts; choose an ep_size of at most so many that "
            "divides the data ranks, and neighbours beyond it have copies of the experts"
        )
    if not isinstance(experts, ExpertModules | FusedExperts):
        return f"{type(experts).__name__} is neither ExpertModules nor FusedExperts; derive it from one of them"
    if any(True for _ in experts.buffers()):
        return "its experts have buffers, which engines keep equal on all data ranks; use experts without buffers"
    return ""


def attach(context: Context) -> None:
    """Let groups go when the engine ends. Local."""
    layers = [each for each in context.module.modules() if isinstance(each, RoutedExperts) and each in _shared_out]

    routers = [each for each in context.module.modules() if isinstance(each, Router)]

    def leave(_: Any) -> None:
        for layer in layers:
            layer.leave_expert_group()
        for router in routers:
            router.set_balance_group(None)

    context.bus.subscribe(Event.CLOSE, leave)
