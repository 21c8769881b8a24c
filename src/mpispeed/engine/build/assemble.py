"""Construction of an engine's components from a plan, bottom up."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.clock import Clock
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Bus
from mpispeed.engine import step, updates
from mpispeed.engine.backward import Accumulation, Counters
from mpispeed.engine.buffers import Buffers
from mpispeed.engine.build import lead
from mpispeed.engine.build.nvme_tiers import check_rule, is_swapping
from mpispeed.engine.build.parts import Optimization, Parts, Sharding
from mpispeed.engine.build.recomputing import configure_recomputation
from mpispeed.engine.build.slot_limits import check_slots
from mpispeed.engine.build.stores import shard
from mpispeed.engine.estimate.host_budget import require_host_budget
from mpispeed.engine.facade import EngineOptimizer, InnerOptimizer, ParameterOffload, StepLink, make_handle
from mpispeed.engine.layerwise import LayerwiseUpdate
from mpispeed.engine.matrix_groups import slots_apart, split_groups
from mpispeed.engine.matrix_update import MatrixUpdate
from mpispeed.engine.plan_parts import choose_reducer, make_sums
from mpispeed.engine.replica_groups import Sharing
from mpispeed.exchange.making import Making
from mpispeed.exchange.table import kind_of
from mpispeed.optim import mup
from mpispeed.optim.choice import TESTED_FOR_CUTS, build, rule_of
from mpispeed.optim.exchange import Drifts
from mpispeed.optim.foreign import Foreign
from mpispeed.optim.rule import Layerwise, Matrixwise, Rule
from mpispeed.optim.schedule import build_schedule
from mpispeed.optim.torch_rule import in_windows
from mpispeed.pipe.module import PipelineModule
from mpispeed.plan.local_gradients import require_whole
from mpispeed.plan.mixed import find_norms, make_scaler
from mpispeed.plan.state_dtypes import require_codes
from mpispeed.plan.units import kinds_of
from mpispeed.precision.cast import Casting
from mpispeed.sharding.averaged_gradients import AveragedGradients
from mpispeed.sharding.grads import GradHooks, GradStore
from mpispeed.sharding.replicated_params import broadcast_rest
from mpispeed.sharding.update_windows import StateStore, UpdateWindows, ZeroState, takes_any_cut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from mpispeed.engine.hooks import Setup
    from mpispeed.exchange.strategy import ExchangeStrategy
    from mpispeed.mesh.mesh import Mesh
    from mpispeed.plan.plan import Plan
    from mpispeed.precision.scaler import LossScale
    from mpispeed.sharding.params import ParamStore

log = logging.getLogger(__name__)


def assemble(
    setup: Setup,
    model: nn.Module,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
) -> Parts:
    """Build everything an engine holds, bottom up.

    Collective over: all ranks.
    """
    plan, mesh = setup.plan, setup.mesh
    rule, groups, basic = _choose_together(plan, mesh, model, optimizer, model_parameters)
    _require_trainable(mesh, groups, is_needed=rule is not None)
    group_of = {id(param): index for index, group in enumerate(groups) for param in group["params"]}
    scaler = make_scaler(plan.config, plan.mixed, goes_on=plan.outlasts_overflows)
    check_rule(plan, rule, rule.name if rule is not None else "")
    check_slots(plan, rule, model)
    slots = rule.state_names if rule is not None else ()
    apart = slots_apart(rule, groups)
    require_host_budget(mesh.world.comm, plan, model, group_of=group_of, slots=slots, rule=rule, slots_of=apart)
    sharing, kinds = Sharing.of(mesh, model), kinds_of(model, mesh["model"].size)
    if mesh["pipe"].size > 1:
        problem = sharing.find_unlike(model, kinds, group_of)
        mesh.world.comm.agree(not problem, problem, ConfigError)
    sharing.equalise([*model.parameters()], kinds)
    sharding = shard(plan, mesh, model, group_of, slots, own_masters=isinstance(rule, Drifts), slots_of=apart)
    table, params = sharding.table, sharding.params
    if not isinstance(model, PipelineModule):  # a pipeline's schedule decides how many micro-batches are kept
        configure_recomputation(plan, mesh)
    alike = {param: kind.partial for param, kind in kinds.items()}
    broadcast_rest(model, table, mesh, plan.mixed.model, plan.device, alike, find_norms(model, plan.mixed))
    counters = Counters()
    optimization, scheduler, bus, clock = None, None, Bus(), Clock()
    steps: Sequence[step.StepPart] = ()
    if rule is not None:
        optimization, update_windows = _optimize(plan, mesh, model, sharding, scaler, counters, rule, groups, basic)
        scheduler = _make_scheduler_or_unhook(plan, optimization, sharding, lr_scheduler)
        update = _make_update(plan, mesh, model, params, optimization, update_windows)
        steps = step_parts(plan, mesh, params, scaler, counters, optimization, update, sharing)
    buffers = Buffers.of(model, mesh["data"])
    leads = optimization is not None and lead.is_kept(plan, mesh, model, params, scaler, optimization)
    run = updates.Updates(
        steps, scaler, counters, bus, groups=groups, scheduler=scheduler,
        exchange=optimization.exchange if optimization is not None else None, buffers=buffers, clock=clock, leads=leads,
    )  # fmt: skip
    casting = _make_casting(plan)
    accumulation = Accumulation(plan.batch.gradient_accumulation_steps, counters, is_undivided=plan.slots is not None)
    if optimization is not None:  # nothing fails after this that would leave the client's object changed
        optimization = _hand_out(optimization, basic, params, counters)
    parts = Parts(
        plan, mesh, model, sharding, bus, scaler, counters, casting, optimization, accumulation, run, scheduler,
        setup.given, sharing=sharing if sharing.shares else None, buffers=buffers, clock=clock,
    )  # fmt: skip
    parts.expect_step()
    return parts


def _make_casting(plan: Plan) -> Casting:
    mixed = plan.mixed
    return Casting(
        plan.policy.compute,
        plan.cast_by,
        mixed.casts_inputs,
        casts_keywords=mixed.casts_keywords,
        outputs=mixed.outputs,
        autocast=mixed.autocast,
        device_type=plan.device.type,
    )


def _hand_out(
    optimization: Optimization, basic: torch.optim.Optimizer | None, params: ParamStore, counters: Counters
) -> Optimization:
    """Give the optimizer that scripts hold, maybe the client's own `basic`, what libraries look for on it."""
    grads, facade = optimization.grads, optimization.facade
    if params.rests_cut:
        vars(facade)["parameter_offload"] = ParameterOffload()
    elif params.shards.table.shards_masters:
        vars(facade)["averaged_gradients"] = AveragedGradients(grads, len(optimization.groups))
    if basic is None:
        return optimization
    unguard = make_handle(basic, optimization.rule, grads.clear, optimization.link, counters)
    return dataclasses.replace(optimization, unguard=unguard)


def _choose_together(
    plan: Plan, mesh: Mesh, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> tuple[Rule | None, list[dict[str, Any]], torch.optim.Optimizer | None]:
    """`choose_rule` that fails on all ranks if it fails on one; stages of a pipeline have different parameters.

    Collective over: all ranks.
    """
    failure: Exception | None = None
    chosen: tuple[Rule | None, list[dict[str, Any]], torch.optim.Optimizer | None] = None, [], None
    widths: mup.Widths | None = None
    try:
        chosen = choose_rule(plan, model, optimizer, model_parameters)
        _refuse_foreign_params(model, chosen[1])
        if optimizer is None and chosen[0] is not None and chosen[0].name in mup.NAMES:
            widths = mup.Widths(chosen[0].name, model, chosen[1])
    except Exception as error:  # the optimizer may be made by a function of the script
        failure = error
    try:
        mesh.world.comm.agree(failure is None, str(failure), ConfigError)
    except ConfigError:
        if failure is None:
            raise
        raise failure from None
    if widths is not None:  # groups are the same on all stages
        everywhere = mesh["pipe"].gather_objects(widths.found)
        return chosen[0], widths.groups([width for found in everywhere for width in found]), None
    return chosen


def choose_rule(
    plan: Plan, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> tuple[Rule | None, list[dict[str, Any]], torch.optim.Optimizer | None]:
    """The update rule, its parameter groups, and the client's optimizer if there is one.

    Raises:
        ConfigError: no such optimizer, a parameter listed twice, or a rule that cannot update shards.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            kind = type(optimizer).__name__
            msg = f"optimizer must be a torch.optim.Optimizer or a callable that makes one, not {kind}"
            raise ConfigError(msg)
        given = list(model_parameters) if model_parameters is not None else list(model.parameters())
        optimizer = optimizer(given or [{"params": []}])  # torch's refuse an empty list, which a stage may have
        if not isinstance(optimizer, torch.optim.Optimizer):
            msg = f"the callable passed as optimizer made a {type(optimizer).__name__}, not a torch.optim.Optimizer"
            raise ConfigError(msg)
    if optimizer is not None:
        rule: Rule = rule_of(optimizer)
        groups = optimizer.param_groups
        name = type(optimizer).__name__
    elif plan.optimizer_name is not None:
        rule, defaults = build(plan.optimizer_name, plan.optimizer_params)
        if isinstance(rule, Matrixwise):
            groups = split_groups(model, make_groups(model, model_parameters, {}), rule)
        else:
            groups = make_groups(model, model_parameters, defaults)
        name = rule.name
    else:
        return None, [], None
    # A client's schedulers count groups, and all stages of a pipeline must have the same groups.
    _check_groups(model, groups, keeps_empty=optimizer is not None or isinstance(model, PipelineModule))
    _check_cuts(plan, rule, name, optimizer)
    require_codes(
        plan.config, name, rule.state_names, takes_any_cut=takes_any_cut(rule) or isinstance(rule, Matrixwise)
    )
    if is_swapping(plan) and isinstance(rule, Foreign):
        rule = in_windows(rule, groups)
    return rule, groups, optimizer


def make_groups(
    model: nn.Module, model_parameters: Iterable[Any] | None, defaults: dict[str, Any]
) -> list[dict[str, Any]]:
    """Parameter groups with defaults filled in: one group for plain parameters, or the caller's groups."""
    items: list[Any] = list(model_parameters) if model_parameters is not None else list(model.parameters())
    if items and isinstance(items[0], dict):
        return [{**defaults, **group, "params": list(group["params"])} for group in items]
    items = [item[1] if isinstance(item, tuple) else item for item in items]
    return [{**defaults, "params": items}]


def _check_groups(model: nn.Module, groups: list[dict[str, Any]], *, keeps_empty: bool) -> None:
    """Drop frozen parameters and refuse duplicates, in place."""
    names = {id(param): name for name, param in model.named_parameters()}
    seen: set[int] = set()
    for group in groups:
        for param in group["params"]:
            if id(param) in seen:
                msg = f"parameter {names.get(id(param), '?')} is listed twice in the optimizer's parameter groups"
                raise ConfigError(msg)
            seen.add(id(param))
        group["params"] = [param for param in group["params"] if param.requires_grad]
    if not keeps_empty:
        groups[:] = [group for group in groups if group["params"]]


def _require_trainable(mesh: Mesh, groups: list[dict[str, Any]], *, is_needed: bool) -> None:
    """Require a trainable parameter on some stage of the pipeline, and equal group settings on all stages.

    Collective over: the pipe axis.
    """
    settings = [{key: _shown(value) for key, value in group.items() if key != "params"} for group in groups]
    found = mesh["pipe"].gather_objects((not is_needed or any(group["params"] for group in groups), settings))
    if not any(has_some for has_some, _ in found):
        msg = "the optimizer has no trainable parameter: every requires_grad is False or the groups are empty"
        raise ConfigError(msg)
    odd = [stage for stage, (_, others) in enumerate(found) if others != found[0][1]]
    if odd:
        msg = (
            f"the parameter groups of stage {odd[0]} are not those of stage 0 ({len(found[odd[0]][1])} and "
            f"{len(found[0][1])}, or with other settings); give all stages the same groups in the same order, with an "
            "empty list of params where a stage has none of a group"
        )
        raise ConfigError(msg)


def _shown(value: Any) -> str:
    """A setting of a group as text that is equal on all ranks if the setting is."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous()
        digest = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return f"{plain.dtype} {tuple(plain.shape)} {digest}"
    return repr(value) if isinstance(value, bool | int | float | str | tuple | list | None) else type(value).__name__


def _refuse_foreign_params(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    own = {id(param) for param in model.parameters()}
    foreign = sum(id(param) not in own for group in groups for param in group["params"])
    if foreign:
        msg = (
            f"{foreign} parameters of the optimizer do not belong to the model that was given to initialize; "
            "put them into the model, or leave them out of model_parameters"
        )
        raise ConfigError(msg)


def _check_cuts(plan: Plan, rule: Rule, name: str, client: torch.optim.Optimizer | None) -> None:
    # A client's optimizer counts as known by its exact class only: a subclass may do anything.
    is_known = not isinstance(rule, Foreign) or client is None or type(client) is getattr(torch.optim, name, None)
    is_tested = rule.name in TESTED_FOR_CUTS and is_known
    require_whole(plan, rule, name)
    if rule.is_elementwise is False and not isinstance(rule, Layerwise | Matrixwise) and plan.axes.get("model", 1) > 1:
        text = f"optimizer {name} looks at whole tensors; of layers that are cut over ranks it sees slices"
        logs.once(log, logging.WARNING, text)
    if plan.states.master.is_replicated or is_tested or isinstance(rule, Layerwise | Matrixwise):
        return
    if rule.is_elementwise is False:
        clips = client is not None and any(group.get("max_grad_norm") for group in client.param_groups)
        cure = 'use stage 0, or max_grad_norm 0 and the key "gradient_clipping"' if clips else "use stage 0"
        msg = (
            f"optimizer {name} looks at whole tensors and cannot update cut ones, as zero_optimization.stage "
            f"{plan.stage} asks; {cure}"
        )
        raise ConfigError(msg)
    if not plan.config.zero_allow_untested_optimizer:
        msg = (
            f"optimizer {name} is not among those tested with zero_optimization.stage {plan.stage} "
            f'({", ".join(TESTED_FOR_CUTS)}); set "zero_allow_untested_optimizer": true to use it'
        )
        raise ConfigError(msg)
    logs.once(log, logging.WARNING, f"optimizer {name} is untested with cut states; it must update element by element")


def _optimize(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    sharding: Sharding,
    scaler: LossScale,
    counters: Counters,
    rule: Rule,
    groups: list[dict[str, Any]],
    basic: torch.optim.Optimizer | None,
) -> tuple[Optimization, UpdateWindows]:
    table, params = sharding.table, sharding.params
    reducer = choose_reducer(plan, model, table)
    shards, sums, channel = make_sums(plan, params.shards, reducer, sharding.wait)
    states = StateStore(table, params.shards, rule.state_names, params.tiers, codes=True)
    _tell_uncut(plan, params, rule)
    update_windows = UpdateWindows(params.shards, shards, states, rule, most_elements=plan.window_elements)
    making = Making(plan, mesh, params, shards, sums, channel, states, rule, groups, update_windows, is_swapping(plan))
    exchange = _make_exchange(making, sharding)
    requires_all = not plan.config.zero_optimization.ignore_unused_parameters
    grads = GradStore(shards, exchange.units, channel, requires_all=requires_all)
    landed = sharding.module_hooks.landed if sharding.module_hooks is not None else None
    # With fp16, scripts read the loss scale off the optimizer, and a client's own object does not have it.
    link = StepLink()
    inner = InnerOptimizer(groups, counters, link, grads.clear) if basic is None else basic
    own = EngineOptimizer(groups, scaler, grads.clear, rule.name, link, inner)
    facade = own if basic is None or plan.mixed.computes_half else basic
    hooks = GradHooks(table, grads, landed)
    state = ZeroState(params, grads, states, rule, groups, lambda: exchange.has_local_params)
    return Optimization(state, hooks, facade, basic or own, link, exchange), update_windows


def _tell_uncut(plan: Plan, params: ParamStore, rule: Rule) -> None:
    """Warn where `sub_group_size` would cut an update that has to stay as it is."""
    most, span = plan.window_elements, params.shards.span
    if most is None or takes_any_cut(rule) or all(span(unit).numel <= most for unit in params.table.units):
        return
    text = (
        f"zero_optimization.sub_group_size {most} has no effect: optimizer {rule.name} gets whole parameters, or keeps "
        "states of its own for the parts that it has been given"
    )
    logs.once(log, logging.WARNING, text)


def _make_exchange(making: Making, sharding: Sharding) -> ExchangeStrategy:
    """The exchange that serves the rule; on failure the model can be given to another `initialize`.

    Collective over: all ranks.

    Raises:
        ConfigError: on every rank, if one cannot have it.
    """
    try:
        return kind_of(making.rule).make(making)
    except ConfigError:
        sharding.remove()
        raise


def _make_scheduler_or_unhook(
    plan: Plan, optimization: Optimization, sharding: Sharding, lr_scheduler: Any
) -> Any | None:
    """`make_scheduler`; on failure hooks are removed, so that the model can be given to another `initialize`."""
    try:
        return make_scheduler(plan, optimization, lr_scheduler)
    except BaseException:
        optimization.hooks.remove()
        sharding.remove()
        raise


def make_scheduler(plan: Plan, optimization: Optimization, lr_scheduler: Any) -> Any | None:
    """The scheduler given in code (object or callable), else the JSON's, else None.

    Raises:
        ConfigError: a scheduler object that is bound to an optimizer the engine does not use.
    """
    if lr_scheduler is None:
        if plan.scheduler_name is None:
            return None
        return build_schedule(plan.scheduler_name, plan.scheduler_params, optimization.basic)
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler) or not callable(lr_scheduler):
        bound = getattr(lr_scheduler, "optimizer", None)
        if bound is not None and bound is not optimization.basic:
            msg = (
                f"lr_scheduler is a {type(lr_scheduler).__name__} bound to an optimizer that the engine does not use; "
                "pass that optimizer too, or pass a callable that makes the scheduler"
            )
            raise ConfigError(msg)
        return lr_scheduler
    return lr_scheduler(optimization.basic)


def step_parts(
    plan: Plan,
    mesh: Mesh,
    params: ParamStore,
    scaler: LossScale,
    counters: Counters,
    optimization: Optimization,
    update: step.Update,
    sharing: Sharing,
) -> list[step.StepPart]:
    """The parts of a step in their order; see `engine/step.py`."""
    grads, exchange = optimization.grads, optimization.exchange
    exchanging = (step.ExchangeBefore(exchange), step.ExchangeAfter(exchange)) if exchange.is_phased else ()
    return [
        step.CheckParams(params),
        step.FinishReduce(grads),
        *([step.SumShared(grads, sharing)] if sharing.shares else []),
        step.MeasureNorm(mesh, grads, sharing if sharing.shares else None, counters),
        step.AdjustScale(scaler, mesh, grads),
        step.ScaleAndClip(plan.gradient_clipping),
        *exchanging[:1],
        update,
        *exchanging[1:],
        step.Publish(params),
        step.ClearGrads(grads),
    ]


def _make_update(
    plan: Plan,
    mesh: Mesh,
    model: nn.Module,
    params: ParamStore,
    optimization: Optimization,
    update_windows: UpdateWindows,
) -> step.Update:
    rule, groups, optimizer = optimization.rule, optimization.groups, optimization.facade
    has_parts = params.table.shards_masters or mesh["model"].size > 1
    if isinstance(rule, Layerwise) and has_parts:
        return LayerwiseUpdate(mesh, rule, update_windows, groups, optimizer, params)
    if isinstance(rule, Matrixwise):
        return MatrixUpdate(plan, mesh, model, rule, update_windows, groups, optimizer, params)
    return step.Update(mesh, rule, update_windows, groups, optimizer)
