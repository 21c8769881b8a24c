"""`eigenvalue`: the curvature of blocks in training, as a series of monitors and for schedules of bits."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpispeed.base import log as logs
from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.engine.curvature import Iteration, beside_largest
from mpispeed.engine.hessians import StagedHessians, WholeHessians
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.engine.step import Place
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpispeed.config.data import Eigenvalue as Section
    from mpispeed.config.root import Config
    from mpispeed.engine.hessians import Hessians
    from mpispeed.engine.step import StepContext

log = logging.getLogger(__name__)

SERIES = "Train/Eigenvalues/ModelBlockParam_{}"


def section_of(config: Config) -> Section | None:
    """The section that is enabled: `eigenvalue`, or that of `quantize_training`; None if neither is."""
    moq = config.quantize_training
    if config.eigenvalue.enabled:
        return config.eigenvalue
    return moq.eigenvalue if moq.enabled and moq.eigenvalue.enabled else None


def attach(context: Context) -> Hooks:
    """Compute eigenvalues in the backward passes that precede every so many updates, or after those of a pipeline.

    Collective over: all ranks, for a pipeline.

    Raises:
        ConfigError: the blocks are not there, or no rank has a whole block.
    """
    section = section_of(context.plan.config)
    if section is None:
        return Hooks(published={"eigenvalues": None})
    model = context.module
    try:
        if isinstance(model, PipelineModule):
            hessians: Hessians = StagedHessians(context, section, model)
        else:
            hessians = WholeHessians(context, section)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    _require_whole(context, hessians)
    eigenvalues = Eigenvalues(context, section, hessians)
    context.bus.subscribe(Event.STEP_END, eigenvalues.tell)
    is_staged = isinstance(model, PipelineModule)
    return Hooks(
        [(Place.START, eigenvalues.follow_stages)] if is_staged else (),
        batch=eigenvalues.keep if is_staged else None,
        before_backward=None if is_staged else eigenvalues.follow,
        state=eigenvalues.state,
        check=eigenvalues.check,
        load=eigenvalues.load,
        published={"eigenvalues": eigenvalues},
    )


def _require_whole(context: Context, hessians: Hessians) -> None:
    """Refuse blocks of which ranks have parts.

    Raises:
        ConfigError: there is one.
    """
    if context.mesh["model"].size > 1:
        msg = "eigenvalue.enabled with slices (tensor_parallel): no rank has a whole block; use one slice, or false"
        raise ConfigError(msg)
    if any(distinct_over(param) > 1 for block in hessians.blocks for param in block.parameters()):
        msg = (
            "eigenvalue.enabled with experts that differ between ranks: no rank has a whole block; use an ep_size "
            "of 1, or set it to false"
        )
        raise ConfigError(msg)


class Eigenvalues:
    """The largest eigenvalues of the Hessian of each block, of the mean loss of a micro-batch over data ranks.

    Attributes:
        values: the last magnitudes of each block as parts of the largest; empty before the first.
        latest: the last eigenvalues themselves.
        is_needed: asked before each computation; nothing is computed while it says no. The same on all ranks.
    """

    def __init__(self, context: Context, section: Section, hessians: Hessians) -> None:
        """No values yet."""
        self._context, self._section, self._hessians = context, section, hessians
        self._iteration = Iteration(section.max_iter, section.tol, section.stability)
        self._batch: Any = None
        self._is_fresh = False
        self.values: list[float] = []
        self.latest: list[float] = []
        self.is_needed: Callable[[], bool] = lambda: True

    def curvature_of(self, name: str) -> float | None:
        """The value of the block with the layer or parameter `name`, from 0 to 1. Local.

        None for names outside of blocks, and before the first computation.
        """
        pairs = zip(self._hessians.names, self.values, strict=False)
        return next((value for block, value in pairs if f"{name}.".startswith(f"{block}.")), None)

    # -- in a pass -------------------------------------------------------------------------------------------------

    def follow(self, loss: torch.Tensor) -> None:
        """Compute eigenvalues if they are due after this pass, whose graph stays.

        Collective over: the data axis.

        Raises:
            UsageError: an operator of the model has no second derivative.
        """
        parts = self._context.parts
        is_last = parts.accumulation.is_gradient_accumulation_boundary()
        if is_last and self._is_due(parts.counters.global_steps + 1):
            try:
                self._compute(loss)
            except UsageError as error:
                error.is_collective = True  # the model is the same on all ranks
                raise

    def keep(self, batch: Any, is_training: bool) -> Any:
        """Keep the pair that a stage has loaded. Local."""
        if is_training:
            self._batch = batch
        return batch

    def follow_stages(self, ctx: StepContext) -> None:
        """Part of a pipeline's step: compute eigenvalues of its last micro-batch if they are due.

        Collective over: all ranks.

        Raises:
            UsageError: on every rank, if an operator of one has no second derivative.
        """
        counters, batch = self._context.counters, self._batch
        self._batch = None
        if not self._is_due(counters.global_steps + 1):
            return
        failed = torch.tensor([float(counters.has_failed)])
        self._context.mesh.world.comm.all_reduce(failed, "max")
        if not failed.item():  # else the step ends without an update
            with sdpa_kernel(
                SDPBackend.MATH
            ):  # fused attention has no second derivatives, and this forward pass is our own
                self._compute(batch)

    def _is_due(self, step: int) -> bool:
        return step % self._section.gas_boundary_resolution == 0 and self.is_needed()

    def _compute(self, given: Any) -> None:
        parts, hessians = self._context.parts, self._hessians
        found = []
        try:
            with parts.sharding.unwinding(), parts.casting.named():
                hessians.begin(given, parts.scaler.scale)
                for number in range(len(hessians.names)):
                    agreed = functools.partial(hessians.agreed, number)
                    found.append(self._iteration.run(hessians.product(number), hessians.start(number), agreed))
        finally:
            hessians.end()
        self.latest, self.values, self._is_fresh = found, beside_largest(found), True
        if self._section.verbose and self._context.mesh.rank == 0:
            log.info("eigenvalues of %s: %s", self._section.layer_name, ", ".join(f"{value:.4g}" for value in found))

    # -- after a step -------------------------------------------------------------------------------------------------

    def tell(self, event: Mapping[str, Any]) -> None:
        """Write the points of a step to the monitors. Local."""
        if self._is_fresh:
            for number, value in enumerate(self.values):
                self._context.write(SERIES.format(number), value)
        elif self._is_due(event["global_step"]) and self._context.mesh.rank == 0:
            text = (
                "no eigenvalues were computed for a step, because they need engine.backward(loss), not loss.backward()"
            )
            logs.once(log, logging.WARNING, text)
        self._is_fresh = False

    def state(self) -> dict[str, Any]:
        """Plain values for checkpoints."""
        return {"layer_name": self._section.layer_name, "eigenvalues": list(self.latest)}

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse other things than finite numbers.

        Raises:
            ConfigError: they are something else.
        """
        values = state.get("eigenvalues")
        if not isinstance(values, list) or not all(isinstance(each, float) and math.isfinite(each) for each in values):
            msg = f"eigenvalues are {values!r:.200}; expected a list of finite numbers"
            raise ConfigError(msg)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take values back, if they are those of the same blocks; else none are known."""
        values: Sequence[float] = state["eigenvalues"]
        is_same = state.get("layer_name") == self._section.layer_name and len(values) == len(self._hessians.names)
        self.latest = list(values) if is_same else []
        self.values = beside_largest(self.latest)
