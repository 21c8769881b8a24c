"""`compression_training` and `quantize_training`: layers compute with compressed values as training goes on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpispeed.base.distinct import distinct_over, mark_distinct
from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine import compression_blocks
from mpispeed.engine.hooks import Context, Hooks, Setup
from mpispeed.engine.state.global_layout import GlobalLayout
from mpispeed.engine.step import Place
from mpispeed.nn.compression import Compression, LayerState, compress, compression_of, read_groups
from mpispeed.nn.compression.bits import BitPlan, BitSchedule
from mpispeed.nn.compression.layers import RANGE
from mpispeed.nn.compression.model import is_taught
from mpispeed.nn.compression.record import record_of
from mpispeed.nn.compression.techniques import WEIGHTS
from mpispeed.nn.tensor.tensor_cut import OWN, marks_of
from mpispeed.optim.expert_groups import is_moe_param

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from mpispeed.config.root import Config
    from mpispeed.engine.compression_blocks import BlockPruning
    from mpispeed.engine.step import StepContext

log = logging.getLogger(__name__)


def values_of(config: Config) -> dict[str, Any]:
    """The section `compression_training` as plain values; `quantize_training` counts as weight quantization."""
    values = config.compression_training.model_dump()
    if config.quantize_training.enabled:
        values["weight_quantization"] = config.quantize_training.technique.model_dump()
    return values


def transform(model: nn.Module, setup: Setup) -> None:
    """Give layers their techniques, unless `init_compression` has done it.

    An engine without optimizer leaves its model as it is: scripts have one for the teacher, with the same config.

    Collective over: the pipe axis.

    Raises:
        ConfigError: the groups of the config do not fit to the model, or to what it has already.
    """
    _tell_untaught(model, setup)
    groups = read_groups(values_of(setup.plan.config))
    if not groups:
        return
    if not setup.given.has_optimizer and compression_of(model) is None:
        if setup.mesh.rank == 0:
            log.info("an engine without optimizer compresses nothing; call init_compression(model, config) for it")
        return
    own = [name for name, _ in model.named_modules()]
    names = {name for stage in setup.mesh["pipe"].gather_objects(own) for name in stage}
    compression = compress(model, groups, elsewhere=names.difference(own))
    for name in compression.layers.keys() - own:
        del compression.layers[name]  # an expert that other ranks have, now that they are shared out
    _refuse_slices(model, compression)
    _mark_scores(model, compression)


def _tell_untaught(model: nn.Module, setup: Setup) -> None:
    """Warn if `layer_reduction` is enabled and nothing has been copied: an engine has no teacher to copy from.

    Collective over: the pipe axis, if it is enabled and the model is trained.
    """
    if not (setup.plan.config.compression_training.layer_reduction.enabled and setup.given.has_optimizer):
        return
    if not any(setup.mesh["pipe"].gather_objects(is_taught(model))) and setup.mesh.rank == 0:
        log.warning(
            "compression_training.layer_reduction is enabled, and no layer of the model was copied from a teacher: "
            "initialize copies none; call student_initialization(student, teacher, config) before it, unless "
            "load_checkpoint brings the layers"
        )


def _refuse_slices(model: nn.Module, compression: Compression) -> None:
    """Refuse layers of which no rank knows enough.

    Raises:
        ConfigError: the model slices a layer by its own code, and a technique has to know the full one; or a running
            range would have to know tokens of other slices.
    """
    for name, state in compression.layers.items():
        layer = model.get_submodule(name)
        cut = marks_of(layer).cuts.get("weight")
        methods = [method for method in state.techniques if method != WEIGHTS]
        if cut is not None and cut.kind == OWN and methods:
            msg = (
                f"compression_training.{methods[0]}: layer {name} is cut over ranks by the model's own code, and what "
                "stays and which range counts hangs on the full layer; let initialize cut it (tensor_parallel in the "
                "config), or quantize its weights only, each slice with its own scales"
            )
            raise ConfigError(msg)
        if RANGE in layer._buffers and "weight" in marks_of(layer).partial:
            msg = (
                f"compression_training.activation_quantization: layer {name} gets other tokens on each slice, as whole "
                "experts do, and has no running range of all; use range_calibration dynamic for it"
            )
            raise ConfigError(msg)


def _mark_scores(model: nn.Module, compression: Compression) -> None:
    """Let scores belong to the ranks that have the weights: those of an expert are not in the means of all ranks.

    Raises:
        ConfigError: a mask or range, which is one for all data ranks, is in a layer that differs between them.
    """
    for name in compression.layers:
        layer = model.get_submodule(name)
        weight = layer._parameters.get("weight")
        if weight is None or (distinct_over(weight) == 1 and not is_moe_param(weight)):
            continue
        scores = [param for key, param in layer._parameters.items() if param is not None and key.endswith("_scores")]
        for each in scores if is_moe_param(weight) else ():
            vars(each).update(allreduce=False, group_name=getattr(weight, "group_name", None))
        ranks = distinct_over(weight)
        held = next((key for key in layer._buffers if key == RANGE or key.endswith("_mask")), None)
        if ranks > 1 and held is not None:
            msg = (
                f"compression_training: layer {name} differs between {ranks} data ranks, as experts do, and its {held} "
                "would be kept equal on all of them; use range_calibration dynamic and method topk for such layers"
            )
            raise ConfigError(msg)
        mark_distinct(scores, ranks)


def attach(context: Context) -> Hooks:
    """Follow the schedules of a model that is compressed.

    Collective over: all ranks, if it is.

    Raises:
        ConfigError: scores would not be trained, or blocks cannot be pruned as the settings say.
    """
    compression = compression_of(context.module)
    if compression is None:
        return Hooks(published={"compression": None})
    run = Run(context, compression)
    context.bus.subscribe(Event.CLOSE, lambda _: run.end())
    blocks = compression_blocks.attach(context, compression)
    context.bus.subscribe(Event.LOAD_END, lambda _: run.loaded(blocks))
    if context.parts.optimization is not None:  # behind what is collective: a stage may be the only one with scores
        _require_trained_scores(context, compression)
    return Hooks(
        [*([] if blocks is None else [(Place.CLIPPED, blocks)]), (Place.PUBLISHED, run)],
        state=run.state,
        check=run.check,
        load=run.load,
        slots=None if blocks is None else blocks.slots,
        published={"compression": compression},
    )


def _require_trained_scores(context: Context, compression: Compression) -> None:
    for name in compression.layers:
        for key, param in context.module.get_submodule(name).named_parameters(recurse=False):
            if key.endswith("_scores") and param.requires_grad and context.params.table.find(param) is None:
                msg = (
                    f"compression_training: {name}.{key} would not be trained: the parameters that initialize "
                    "was given do not have it; call init_compression(model, config) before the optimizer or the list "
                    "of parameters is made, or leave both to initialize"
                )
                raise ConfigError(msg)


class Run:
    """The compression of one run; as a part of a step it goes on by one update.

    Quantizing the copies of weights that a step publishes, as DeepSpeed does, and quantizing them when they are used
    is the same: they come from the masters at each step. So layers only need to know their bits.
    """

    def __init__(self, context: Context, compression: Compression) -> None:
        """Begin before the first update. Collective over: all ranks."""
        self._compression, self._is_first = compression, context.mesh.rank == 0
        self._counters = context.counters
        own = {name: plan for name, state in compression.layers.items() if (plan := _plan_of(state)) is not None}
        # Every rank knows those of all stages, so that any of them can write or read a checkpoint.
        plans = {name: plan for ranks in context.mesh.world.comm.gather_objects(own) for name, plan in ranks.items()}
        self._schedules = {name: BitSchedule(plan) for name, plan in plans.items()}
        layers = context.mesh["pipe"].gather_objects(_record(context, compression))
        self._record = {name: layer for stage in layers for name, layer in stage.items()}
        self._curvatures = context.published.get("eigenvalues")
        if self._curvatures is not None and plans:
            self._curvatures.is_needed = lambda: any(each.is_falling for each in self._schedules.values())
        for name in compression.layers:
            held = context.module.get_submodule(name)._buffers.get(RANGE)
            if held is not None:
                held.data = held.data.float()  # in 16 bits a running mean would stand still
        compression.progress.follow(context.parts.passes)
        self._show(self._counters.applied_steps)

    def __call__(self, ctx: StepContext) -> None:
        """Count an update. Local, the same on all ranks."""
        if ctx.skip:
            return
        step = self._counters.applied_steps + 1
        for name, schedule in self._schedules.items():
            before = schedule.bits
            schedule.advance(None if self._curvatures is None else self._curvatures.curvature_of(name))
            if schedule.bits != before and self._is_first and self._tells(name):
                log.info("update %d: weights of %s have %d bits now", step, name, schedule.bits)
        self._show(step)

    def _tells(self, name: str) -> bool:
        state = self._compression.layers.get(name)
        return state is not None and state.weight_quantization is not None and state.weight_quantization.verbose

    def _show(self, step: int) -> None:
        """Let layers compute with what the schedules say after so many updates."""
        self._compression.set_step(step)
        for name, schedule in self._schedules.items():
            if name in self._compression.layers:
                self._compression.layers[name].bits = schedule.bits
                self._compression.layers[name].mixed = schedule.mix

    def end(self) -> None:
        """Follow no passes any more; the model may go on without the engine."""
        self._compression.progress.leave()

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        bits = {name: each.state() for name, each in self._schedules.items()}
        return {"bits": bits, "layers": self._record}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse what is no such state.

        Raises:
            ConfigError: says what is wrong.
        """
        bits = state.get("bits")
        if not isinstance(bits, dict):
            msg = f"the bits of layers are {bits!r:.100}; expected a table"
            raise ConfigError(msg)
        for name, each in self._schedules.items():
            if name in bits:
                BitSchedule(each.plan).load(bits[name])

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on at the update of a checkpoint, on the schedules of the config. Local."""
        step = self._counters.applied_steps
        for name, each in self._schedules.items():
            each.load(state["bits"].get(name) or {"now": [step, 0, 0, 0]})
        self._show(step)

    def loaded(self, blocks: BlockPruning | None) -> None:
        """Look at masks again; go on at the update of the run, if its checkpoint knew nothing of compression. Local."""
        if self._compression.progress.step != self._counters.applied_steps:
            self.load({"bits": {}})
            if blocks is not None:
                blocks.tell_late()
        self._compression.forget_masks()


def _record(context: Context, compression: Compression) -> dict[str, Any]:
    """The record of the layers of this stage, those of experts on other ranks too."""
    end = ".weight"  # experts are known by the names of their parameters
    own = [(name + end, layer) for name, layer in record_of(context.module, compression).items()]
    everyone = GlobalLayout.of(context.parts).experts.expanded(own, lambda _, layer: layer)
    return {name.removesuffix(end): layer for name, layer in everyone}


def _plan_of(state: LayerState) -> BitPlan | None:
    """The schedule of a layer whose bits fall."""
    weights = state.weight_quantization
    if weights is None or weights.in_forward:
        return None
    return BitPlan(weights.start_bits, weights.target_bits, weights.period, weights.offset, weights.change_ratio or 0.0)
