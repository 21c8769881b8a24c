"""`data_efficiency.data_routing.random_ltd`: layers of the model see a random part of the tokens in training."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mpispeed.base.errors import ConfigError
from mpispeed.base.events import Event
from mpispeed.engine.hooks import Context, Hooks
from mpispeed.nn.routing.convert import dropping_layers, routes_of
from mpispeed.nn.routing.schedule import RandomLTDScheduler
from mpispeed.nn.routing.token_drop import DropSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mpispeed.base.passes import Pass, Passes

log = logging.getLogger(__name__)

LENGTH_SERIES = "Train/Samples/random_ltd_reserved_length"
TOKENS_SERIES = "Train/Samples/consumed_layer_tokens"


def attach(context: Context) -> Hooks | None:
    """Follow the schedule, and drop tokens in layers that were converted; None where it is off.

    Collective over: the pipeline stages, if layers were converted before `initialize`.

    Raises:
        ConfigError: the numbers of layers that were converted do not fit, or ranks share sequences.
    """
    if not context.plan.config.data_efficiency.routes_tokens:
        return None
    sharing = context.mesh["sequence"].size
    if sharing > 1:
        msg = (
            f"data_efficiency.data_routing.random_ltd chooses tokens of whole samples, and {sharing} ranks share each "
            "sequence; disable it, or set sequence_parallel_size to 1"
        )
        raise ConfigError(msg)
    dropping = TokenDropping(context)
    passes: Passes = context.parts.passes
    passes.is_watched = True
    passes.listeners.append(dropping.follow)
    context.bus.subscribe(Event.STEP_END, dropping.tell)
    context.bus.subscribe(Event.CLOSE, dropping.end)
    stages = context.mesh["pipe"].gather_objects(bool(routes_of(context.module)))
    if any(stages):
        dropping.begin()
    return Hooks(
        state=dropping.scheduler.state_dict,
        check=dropping.check,
        load=dropping.load,
        published={"random_ltd_scheduler": dropping.scheduler, "random_ltd_initialize": dropping.begin},
    )


class TokenDropping:
    """The dropping of tokens of one run.

    Attributes:
        scheduler: the reserved length, and layer tokens; `engine.random_ltd_scheduler`.
    """

    def __init__(self, context: Context) -> None:
        """Layers drop nothing before `begin`."""
        self._context = context
        section = context.plan.config.data_efficiency.data_routing.random_ltd
        self._wanted, self._count = list(section.random_ltd_layer_id), section.random_ltd_layer_num
        batch = context.plan.batch
        config = section.model_dump() | {
            "micro_batch_size": batch.micro_batch_size,
            "global_batch_size": batch.train_batch_size,
        }
        self.scheduler = RandomLTDScheduler(config)
        seed = context.plan.config.data_efficiency.seed
        self._settings = DropSettings.of(config, self.scheduler, seed, _place(context))
        self._is_begun = False

    def begin(self) -> None:
        """Let the converted layers of the model drop tokens, on the stages that have them.

        Collective over: the pipeline stages.

        Raises:
            ConfigError: (a ValueError) on every stage, if numbers of layers do not fit; see `nn.routing.convert`.
        """
        routes, pipe = routes_of(self._context.module), self._context.mesh["pipe"]
        names: list[list[str]] = pipe.gather_objects(list(routes))
        places = dropping_layers((name for stage in names for name in stage), self._wanted, self._count)
        with pipe.together(ConfigError):
            for name, route in routes.items():
                route.clear()
                if name in places:
                    route.configure(name, places[name], self._settings)
        self._is_begun = True

    # -- a run ------------------------------------------------------------------------------------------------------

    def follow(self, begun: Pass) -> None:
        """Move the schedule to the step of a training pass. Local, the same on all ranks."""
        if not begun.is_training:
            return
        if not self._is_begun:
            self._is_begun = True  # told once
            if self._context.mesh.rank == 0:
                log.warning(
                    "random_ltd is enabled, and no layer drops tokens: call "
                    "mpispeed.nn.routing.convert_to_random_ltd(engine, Layer) before training"
                )
        self.scheduler.global_batch_size = self._context.parts.plan.batch.train_batch_size
        self.scheduler.update_seq(begun.global_step)

    def tell(self, event: Mapping[str, Any]) -> None:
        """Write the series of a step, and a line to the log. Local, on rank 0."""
        if self._context.mesh.rank:
            return
        length, tokens = self.scheduler.get_current_seq(), self.scheduler.state["consumed_layer_tokens"]
        monitor = self._context.published["monitor"]
        monitor.write_events([(LENGTH_SERIES, length, event["samples"]), (TOKENS_SERIES, tokens, event["samples"])])
        every = self._context.plan.steps_per_print
        if every and event["global_step"] % every == 0:
            log.info("random-LTD | %d tokens of a sample are kept, %.4g layer tokens so far", length, tokens)

    def end(self, _: Mapping[str, Any]) -> None:
        """Drop no tokens any more; the model may go on without the engine."""
        for route in routes_of(self._context.module).values():
            route.clear()

    # -- state ------------------------------------------------------------------------------------------------------

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError: numbers of the scheduler are missing."""
        for name in self.scheduler.state_dict():
            int(state[name])

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the place of a checkpoint on the schedule of the config, which may be another now. Local."""
        scheduler = self.scheduler
        own = {name: scheduler.state[name] for name in ("min_value", "max_value")}
        scheduler.load_state_dict({**state, **own})
        if any(int(state[name]) != value for name, value in own.items()):
            scheduler.set_current_seq(scheduler.get_value(max(0, scheduler.state["current_steps"])))


def _place(context: Context) -> Callable[[], tuple[int, int]]:
    """A function that gives the step and the number of this rank's first sample of the pass that runs."""
    parts, batch = context.parts, context.mesh["batch"]
    rank, size = batch.rank, batch.size

    def place() -> tuple[int, int]:
        current = parts.passes.current
        number = current.micro_step * size + rank if current.slot is None else current.slot
        return current.global_step, number * parts.plan.batch.micro_batch_size

    return place
