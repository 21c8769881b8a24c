"""`eigenvalue`: the curvature of blocks in training, as a series of monitors and for schedules of bits."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mpispeed.base import log as logs
from mpispeed.base.distinct import distinct_over
from mpispeed.base.errors import ConfigError, UsageError
from mpispeed.base.events import Event
from mpispeed.engine.curvature import (
    Iteration,
    beside_largest,
    find_blocks,
    product_with,
    second_order,
    start_vector,
    trained,
)  # fmt: skip
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.pipe.module import PipelineModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from mpispeed.config.data import Eigenvalue as Section
    from mpispeed.config.root import Config
    from mpispeed.engine.curvature import Product

log = logging.getLogger(__name__)

SERIES = "Train/Eigenvalues/ModelBlockParam_{}"


def section_of(config: Config) -> Section | None:
    """The section that is enabled: `eigenvalue`, or that of `quantize_training`; None if neither is."""
    moq = config.quantize_training
    if config.eigenvalue.enabled:
        return config.eigenvalue
    return moq.eigenvalue if moq.enabled and moq.eigenvalue.enabled else None


def attach(context: Context) -> Hooks:
    """Compute eigenvalues in the backward passes that precede every so many updates.

    Raises:
        ConfigError: the blocks are not there, or not all of a block is in the graph of this rank.
    """
    section = section_of(context.plan.config)
    if section is None:
        return Hooks(published={"eigenvalues": None})
    eigenvalues = Eigenvalues(context, section)
    context.bus.subscribe(Event.STEP_END, eigenvalues.tell)
    return Hooks(
        before_backward=eigenvalues.follow,
        state=eigenvalues.state,
        check=eigenvalues.check,
        load=eigenvalues.load,
        published={"eigenvalues": eigenvalues},
    )


def _blocks(context: Context, section: Section) -> list[nn.Module]:
    """The blocks of the config.

    Raises:
        ConfigError: they are not there, or a Hessian of one cannot be computed.
    """
    if isinstance(context.module, PipelineModule):
        msg = (
            "eigenvalue.enabled with a PipelineModule: second derivatives would have to go back and forth over the "
            "stages; train without a pipeline, or set it to false"
        )
        raise ConfigError(msg)
    if context.mesh["model"].size > 1:
        msg = "eigenvalue.enabled with slices (tensor_parallel): no rank has a whole block; use one slice, or false"
        raise ConfigError(msg)
    try:
        found = find_blocks(context.module, section.layer_name, section.layer_num)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    for number, block in enumerate(found):
        if any(distinct_over(param) > 1 for param in block.parameters()):
            msg = (
                f"eigenvalue.enabled with experts that differ between ranks, in block {number} of "
                f"{section.layer_name!r}: no rank has a whole block; use an ep_size of 1, or set it to false"
            )
            raise ConfigError(msg)
    return found


class Eigenvalues:
    """The largest eigenvalues of the Hessian of each block, of the mean loss of a micro-batch over data ranks.

    Attributes:
        values: the last magnitudes of each block as parts of the largest; empty before the first.
        latest: the last eigenvalues themselves.
        is_needed: asked before each computation; nothing is computed while it says no. The same on all ranks.
    """

    def __init__(self, context: Context, section: Section) -> None:
        """Raises: ConfigError: as `attach`."""
        self._context, self._section = context, section
        self._blocks = [trained(block) for block in _blocks(context, section)]
        self._iteration = Iteration(section.max_iter, section.tol, section.stability)
        self._prefix = f"{section.layer_name}."
        self._data = context.mesh["data"]
        self._is_fresh = False
        self.values: list[float] = []
        self.latest: list[float] = []
        self.is_needed: Callable[[], bool] = lambda: True

    def curvature_of(self, name: str) -> float | None:
        """The value of the block with the layer or parameter `name`, from 0 to 1. Local.

        None for names outside of blocks, and before the first computation.
        """
        number = name.removeprefix(self._prefix).partition(".")[0]
        if not name.startswith(self._prefix) or not number.isdecimal() or int(number) >= len(self.values):
            return None
        return self.values[int(number)]

    # -- in a pass -------------------------------------------------------------------------------------------------

    def follow(self, loss: torch.Tensor) -> None:
        """Compute eigenvalues if they are due after this pass, whose graph stays.

        Collective over: the data axis.

        Raises:
            UsageError: an operator of the model has no second derivative.
        """
        parts = self._context.parts
        if (
            not self._is_due(parts.counters.global_steps + 1)
            or not parts.accumulation.is_gradient_accumulation_boundary()
        ):
            return
        try:
            with parts.sharding.unwinding(), parts.casting.named():
                self.latest = self._computed(loss, parts.scaler.scale)
        except UsageError as error:
            error.is_collective = True  # the model is the same on all ranks
            raise
        self.values, self._is_fresh = beside_largest(self.latest), True
        if self._section.verbose and self._context.mesh.rank == 0:
            told = ", ".join(f"{value:.4g}" for value in self.latest)
            log.info("eigenvalues of blocks of %s: %s", self._section.layer_name, told)

    def _is_due(self, step: int) -> bool:
        return step % self._section.gas_boundary_resolution == 0 and self.is_needed()

    def _computed(self, loss: torch.Tensor, scale: float) -> list[float]:
        everything = [param for params in self._blocks for param in params]
        loss = loss if scale == 1.0 else loss.float() * scale  # in fp16 small gradients would be lost
        grads = list(self._pass(lambda: second_order([loss], everything, keeps_graph=True)))
        found = []
        for number, params in enumerate(self._blocks):
            own, grads = grads[: len(params)], grads[len(params) :]
            product = self._mean(product_with(own, params), scale)
            found.append(self._iteration.run(product, start_vector(params, number), self._agreed))
        return found

    def _pass(self, run: Callable[[], Any]) -> Any:
        """Run a backward pass that leaves a graph. Collective over: the data axis, where parameters are sharded."""
        hooks = self._context.parts.sharding.module_hooks
        with nullcontext() if hooks is None else hooks.saving():
            found = run()
        self._context.parts.sharding.end_backward()
        return found

    def _mean(self, product: Product, scale: float) -> Product:
        """The product of the mean Hessian of all data ranks."""

        def mean(vector: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self._pass(lambda: product(vector))
            self._data.all_reduce(found, "avg")
            return found if scale == 1.0 else found / scale

        return mean

    def _agreed(self, value: float) -> float:
        """The value of the first data rank: ranks have to end iterations alike."""
        told = torch.tensor([value], dtype=torch.float64)
        self._data.broadcast(told)
        return float(told)

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
        """Refuse other things than numbers.

        Raises:
            ConfigError: they are something else.
        """
        values = state.get("eigenvalues")
        if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
            msg = f"eigenvalues are {values!r}; expected a list of numbers"
            raise ConfigError(msg)

    def load(self, state: Mapping[str, Any]) -> None:
        """Take values back, if they are those of the same blocks."""
        values: Sequence[float] = state["eigenvalues"]
        if state.get("layer_name") == self._section.layer_name and len(values) == len(self._blocks):
            self.latest, self.values = list(values), beside_largest(values)
